"""Transports, inferred from the library, the environment and the adapters of the host."""

import pytest

from mpicomp.job.doctor.transports import Transports, adapters, detect_transports, fork_safety

MPICH = "MPICH Version:      5.0.2\nMPICH Device:       ch4:ucx ofi\nMPICH configure: --with-device=ch4:ucx,ofi"
OFI = "MPICH Version:\t4.1\nMPICH Device:\tch4:ofi\n"
OLD = "MPICH Version:\t3.4\nMPICH Device:\tch3:nemesis\n"
IB = ["/opt/lib/libucp.so.0", "/opt/lib/ucx/libuct_ib.so.0"]


@pytest.mark.parametrize(
    ("vendor", "version", "files", "cards", "environ", "expected"),
    [
        ("MPICH", MPICH, [], [], {}, ("ucx", "shared memory", "tcp")),
        ("MPICH", MPICH, IB, ["mlx5_0"], {}, ("ucx", "shared memory", "rdma")),
        ("MPICH", MPICH, [], ["mlx5_0"], {}, ("ucx", "shared memory", "tcp")),  # UCX was built without
        ("MPICH", MPICH, IB, ["mlx5_0"], {"UCX_TLS": "tcp,self"}, ("ucx", "shared memory", "tcp")),
        ("MPICH", MPICH, IB, ["mlx5_0"], {"UCX_TLS": "rc,sm,self"}, ("ucx", "shared memory", "rdma")),
        ("MPICH", MPICH, IB, ["mlx5_0"], {"UCX_TLS": "all"}, ("ucx", "shared memory", "rdma")),
        ("MPICH", MPICH, IB, ["mlx5_0"], {"UCX_TLS": "^tcp"}, ("ucx", "shared memory", "rdma")),
        ("MPICH", MPICH, IB, ["mlx5_0"], {"UCX_NET_DEVICES": "eth0"}, ("ucx", "shared memory", "tcp")),
        ("MPICH", MPICH, IB, ["mlx5_0"], {"UCX_NET_DEVICES": "mlx5_0:1"}, ("ucx", "shared memory", "rdma")),
        ("MPICH", MPICH, IB, [], {"MPIR_CVAR_NOLOCAL": "1"}, ("ucx", "tcp", "tcp")),
        ("MPICH", MPICH, IB, [], {"MPIR_CVAR_NOLOCAL": "0"}, ("ucx", "shared memory", "tcp")),
        ("MPICH", MPICH, IB, ["cxi0"], {"MPIR_CVAR_CH4_NETMOD": "ofi"}, ("ofi", "shared memory", "unknown")),
        ("MPICH", OFI, [], [], {}, ("ofi", "shared memory", "tcp")),
        ("MPICH", OFI, [], ["cxi0"], {"FI_PROVIDER": "cxi"}, ("ofi", "shared memory", "cxi")),
        ("MPICH", OFI, [], ["mlx5_0"], {"FI_PROVIDER": "tcp"}, ("ofi", "shared memory", "tcp")),
        ("MPICH", OLD, [], ["mlx5_0"], {}, ("nemesis", "shared memory", "tcp")),
        ("Some MPI", "Some MPI 1.0", [], [], {}, ("unknown", "unknown", "unknown")),
        ("Open MPI", "", IB, [], {}, ("btl", "shared memory", "tcp")),
        ("Open MPI", "", IB, ["mlx5_0"], {}, ("ucx", "shared memory", "rdma")),
        ("Open MPI", "", IB, ["mlx5_0"], {"OMPI_MCA_pml": "ob1"}, ("btl", "shared memory", "tcp")),
        ("Open MPI", "", IB, [], {"OMPI_MCA_pml": "ob1", "OMPI_MCA_btl": "tcp,self"}, ("btl", "tcp", "tcp")),
        ("Open MPI", "", IB, [], {"OMPI_MCA_btl": "^sm"}, ("btl", "shared memory", "tcp")),
        ("Open MPI", "", IB, [], {"OMPI_MCA_btl": "^sm,vader"}, ("btl", "tcp", "tcp")),
        ("Open MPI", "", IB, [], {"OMPI_MCA_pml": "ucx", "UCX_TLS": "tcp,self"}, ("ucx", "tcp", "tcp")),
        ("Open MPI", "", IB, ["hfi1_0"], {}, ("ofi", "shared memory", "unknown")),
        ("Open MPI", "", IB, [], {"OMPI_MCA_pml": "monitoring"}, ("unknown", "unknown", "unknown")),
    ],
)
def test_transports_follow_library_and_environment(vendor, version, files, cards, environ, expected):
    found = detect_transports(vendor, version, files, cards, environ)
    assert (found.library, found.inside, found.between) == expected
    # The reason names the evidence.
    assert all(f"{name}={value}" in found.reason for name, value in environ.items())


def test_adapters_are_those_of_the_kernel(tmp_path):
    for name in ("infiniband/mlx5_1", "infiniband/mlx5_0", "cxi/cxi0", "net/eth0"):
        (tmp_path / name).mkdir(parents=True)
    assert adapters(tmp_path) == ["mlx5_0", "mlx5_1", "cxi0"]
    assert adapters(tmp_path / "nothing") == []


RDMA, TCP, UNKNOWN = (Transports("ucx", "shared memory", between, "") for between in ("rdma", "tcp", "unknown"))


@pytest.mark.parametrize(
    ("method", "transports", "cards", "environ", "dangerous"),
    [
        ("fork", RDMA, ["mlx5_0"], {}, True),
        ("fork", RDMA, ["mlx5_0"], {"RDMAV_FORK_SAFE": "0"}, True),
        ("fork", RDMA, ["mlx5_0"], {"RDMAV_FORK_SAFE": "1"}, False),
        ("fork", RDMA, ["mlx5_0"], {"IBV_FORK_SAFE": "1"}, False),
        ("forkserver", RDMA, ["mlx5_0"], {}, False),
        ("spawn", RDMA, ["mlx5_0"], {}, False),
        ("fork", TCP, ["mlx5_0"], {}, False),
        ("fork", UNKNOWN, ["cxi0"], {}, True),  # a wrong no crashes, a wrong yes costs a look
        ("fork", UNKNOWN, [], {}, False),
    ],
)
def test_fork_is_dangerous_with_registered_memory(method, transports, cards, environ, dangerous):
    found = fork_safety(method, transports, cards, environ)
    assert (found.method, found.dangerous) == (method, dangerous)
