"""Messages of the command, none of which needs a lab or starts anything."""

import os
import subprocess

import pytest
from lab.labs import FORBIDDEN, MAIN, MASKED, lab_command
from mpicomp.bench.lab import network


def call(*options, prelude=None, environment=None, prefix=()):
    command = lab_command(*options)
    if prelude is not None:
        command[2] = f"{prelude}\n{MAIN}"
    return subprocess.run(
        [*prefix, *command],
        capture_output=True,
        text=True,
        timeout=50,
        check=False,
        env={**os.environ, **(environment or {})},
    )


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            ["--hosts", "2", "--latency", "5", "--", "true"],
            "lab: --latency must be a number with ns, us, ms or s, got '5'",
        ),
        (["--hosts", "0", "--", "true"], "lab: --hosts must be"),
        (["--hosts", "2"], "lab: a command must follow the options"),
        (["--hosts", "2", "--"], "lab: a command must follow the options"),
    ],
)
def test_bad_value_is_one_line_and_status_2(options, message):
    done = call(*options)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith(message)
    assert done.stderr.count("\n") == 1


def test_programs_are_found_that_only_administrators_have_in_their_path(tmp_path, monkeypatch):
    (tmp_path / "tc").touch(0o755)
    monkeypatch.setenv("PATH", "/nowhere")
    monkeypatch.setattr(network, "_SBIN", str(tmp_path))
    assert network.find_program("tc") == str(tmp_path / "tc")
    assert network.find_program("ip") is None


@pytest.mark.parametrize(
    ("prelude", "path", "message"),
    [
        ("import sys, mpicomp.bench.lab.run; sys.platform = 'darwin'", None, "needs Linux"),
        ("from mpicomp.bench.lab import network; network._SBIN = ''", "/nowhere", "needs the command ip"),
    ],
)
def test_machine_without_a_lab_is_refused(prelude, path, message):
    done = call("--hosts", "2", "--", "true", prelude=prelude, environment={"PATH": path} if path else None)
    assert done.returncode == 2
    assert done.stderr.startswith(f"lab: {message}")
    assert done.stderr.count("\n") == 1


def test_forbidden_user_namespaces_are_refused_by_name(user_namespaces):
    done = call("--hosts", "2", "--", "true", prefix=FORBIDDEN)
    assert done.returncode == 2
    assert done.stderr == (
        "lab: needs user namespaces, or root, to make networks, and the kernel refuses them by "
        "user.max_user_namespaces=0; type: sudo sysctl user.max_user_namespaces=15000, or run it with sudo\n"
    )


def test_in_a_container_without_privileges_one_line_says_how_to_start_it(user_namespaces):
    done = call("--hosts", "2", "--", "true", prefix=MASKED)
    assert done.returncode == 2
    assert done.stderr == (
        "lab: needs user namespaces, or root, to make networks, and this user may not make them (Operation not "
        "permitted); run it with sudo; in a container, start that with --privileged, or with --security-opt for each "
        "of seccomp=unconfined, apparmor=unconfined and systempaths=unconfined\n"
    )
