import subprocess
import sys

import pytest
from mpicomp.bench.tasks import get_task

pytestmark = pytest.mark.timeout(60)


def test_unknown_name_is_answered_with_the_nearest():
    with pytest.raises(ValueError, match=r"^task: unknown name 'lstm'; did you mean 'text-lstm'") as error:
        get_task("lstm")
    assert str(error.value).endswith("Known: digits, text-gpt, text-lstm")


def test_negative_seed():
    with pytest.raises(ValueError, match="train: seed must be 0 or larger, got -1"):
        get_task("digits", seed=-1)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("absent", "name", "extra"),
    [("torch", "text-lstm", "torch"), ("sklearn", "digits", "bench")],
)
def test_missing_package_names_its_extra(absent, name, extra):
    code = (
        f"import sys; sys.modules[{absent!r}] = None\n"
        "from mpicomp.bench.tasks import get_task\n"
        f"try: get_task({name!r})\n"
        "except ImportError as error: print(error)"
    )
    done = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    assert f"pip install 'mpicomp[{extra}]'" in done.stdout
