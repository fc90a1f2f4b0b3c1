"""Scripts of the shapes that public ones have are trained, saved, loaded and resumed, on one host."""

from functools import partial

import pytest

torch = pytest.importorskip("torch")

from replicas import assert_replicas  # noqa: E402
from script_shapes import CLIPPING, SCRIPTS, bits, by_hand, exchanging, stopped_and_resumed  # noqa: E402

torch.set_num_threads(1)

SETTINGS = {
    "dense": {"compressor": "dense", "collective": "allreduce"},
    "topk": {"compressor": "topk", "collective": "allgather", "warmup": 0},
}


@pytest.mark.mpi(max_size=3)
@pytest.mark.parametrize("compressor", SETTINGS)
@pytest.mark.parametrize("name", SCRIPTS)
def test_resumed_script_equals_whole_run(comm, tmp_path, name, compressor):
    settings = {"overlap": name not in CLIPPING} | SETTINGS[compressor]
    (whole, _, _), (resumed, _, _) = stopped_and_resumed(SCRIPTS[name], comm, tmp_path, settings)
    assert_replicas(whole, comm)
    assert bits(resumed) == bits(whole)


@pytest.mark.mpi(max_size=3)
@pytest.mark.parametrize("name", SCRIPTS)
def test_script_averages_gradients_as_by_hand(comm, tmp_path, name):
    script = SCRIPTS[name]
    reference, _ = script(comm, tmp_path, partial(by_hand, comm), epochs=2)
    model, optimizer = script(comm, tmp_path, partial(exchanging, comm, SETTINGS["dense"]), epochs=2)
    optimizer.close()
    torch.testing.assert_close(
        dict(model.named_parameters()), dict(reference.named_parameters()), rtol=1e-9, atol=1e-12
    )
