"""Labs of the tests: a skip with its reason where there can be none."""

import json
import os
import subprocess

import pytest
from lab.labs import PROGRAMS, lab_command, reason_without_lab, reason_without_user_namespaces


@pytest.fixture(scope="session")
def lab():
    """Return a function that runs a lab to its end."""
    reason = reason_without_lab()
    if reason is not None:
        pytest.skip(reason)

    def run(*options, command, timeout=50, environment=None, cwd=None, prefix=()):
        return subprocess.run(
            [*prefix, *lab_command(*options), "--", *command],
            capture_output=True,
            text=True,
            timeout=timeout,
            check=False,
            env={**os.environ, **(environment or {})},
            cwd=cwd,
            stdin=subprocess.DEVNULL,
        )

    return run


@pytest.fixture(scope="session")
def user_namespaces():
    reason = reason_without_user_namespaces()
    if reason is not None:
        pytest.skip(reason)


@pytest.fixture(scope="session")
def program(lab):
    """Return a function that runs one of the programs in a lab and returns what it found out."""

    def run(*options, name, arguments=(), **more):
        done = lab(*options, command=["python", PROGRAMS, name, *map(str, arguments)], **more)
        assert done.returncode == 0, done.stderr + done.stdout
        return json.loads(done.stdout)

    return run
