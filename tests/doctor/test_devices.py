import pytest

from mpicomp.doctor.devices import gpus, look

LISTING = """\
GPU 0: NVIDIA H200 (UUID: GPU-aa11)
  MIG 1g.18gb     Device  0: (UUID: MIG-cc33)
GPU 1: NVIDIA A100 (UUID: GPU-bb22)
"""


@pytest.mark.parametrize(
    ("mask", "visible"),
    [
        (None, ["0: NVIDIA H200", "1: NVIDIA A100"]),
        ("1", ["1: NVIDIA A100"]),
        ("1,0", ["1: NVIDIA A100", "0: NVIDIA H200"]),
        ("GPU-bb", ["1: NVIDIA A100"]),
        ("MIG-cc33", ["MIG-cc33: MIG 1g.18gb"]),
        ("", []),
        ("-1", []),
        ("NoDevFiles", []),
    ],
)
def test_what_a_mask_leaves(mask, visible):
    environ = {} if mask is None else {"CUDA_VISIBLE_DEVICES": mask}
    assert gpus(environ, LISTING) == visible
    assert look(environ, LISTING)[1] is None


@pytest.mark.parametrize("mask", ["7", "0,7,1", "GPU-zz"])
def test_a_mask_that_names_what_is_not_there(mask):
    found, error = look({"CUDA_VISIBLE_DEVICES": mask}, LISTING)
    assert found == []
    assert f"CUDA_VISIBLE_DEVICES={mask} names" in error


def test_a_machine_without_gpus_is_no_error():
    assert look({}, "") == ([], None)
