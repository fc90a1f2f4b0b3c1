"""What carries messages, by what the library, the environment and the host say."""

import pytest

from mpicomp.doctor.wires import Wires, adapters, wire_notes, wires

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
def test_what_carries_messages(vendor, version, files, cards, environ, expected):
    found = wires(vendor, version, files, cards, environ)
    assert (found.library, found.inside, found.between) == expected
    # What was decided upon stands in the reason.
    assert all(f"{name}={value}" in found.reason for name, value in environ.items())


def test_adapters_are_those_of_the_kernel(tmp_path):
    for name in ("infiniband/mlx5_1", "infiniband/mlx5_0", "cxi/cxi0", "net/eth0"):
        (tmp_path / name).mkdir(parents=True)
    assert adapters(tmp_path) == ["mlx5_0", "mlx5_1", "cxi0"]
    assert adapters(tmp_path / "nothing") == []


def test_a_fast_network_that_is_not_used():
    slow = Wires("ucx", "shared memory", "tcp", "UCX_TLS=tcp,self")
    [note] = wire_notes(slow, ["mlx5_0"], 1, 2)
    assert note.what == "there is mlx5_0, but MPI talks tcp between hosts (UCX_TLS=tcp,self)"
    assert note.fix.startswith("unset UCX_TLS ")
    assert wire_notes(slow, ["mlx5_0"], 4, 1) == []  # one host
    assert wire_notes(slow, [], 1, 2) == []
    assert wire_notes(Wires("ucx", "shared memory", "rdma", ""), ["mlx5_0"], 4, 2) == []


def test_memory_that_is_not_used():
    alone = Wires("ucx", "tcp", "tcp", "MPIR_CVAR_NOLOCAL=1")
    [note] = wire_notes(alone, [], 2, 1)
    assert note.what == "ranks of one host talk tcp (MPIR_CVAR_NOLOCAL=1)"
    assert wire_notes(alone, [], 1, 4) == []
