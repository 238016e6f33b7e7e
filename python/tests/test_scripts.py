"""Tests that the test scripts of engines skip engines that cannot be installed, and fail on every other error."""

from __future__ import annotations

import os
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[1]
SUITES = ("vllm", "tier", "sglang")
CANNOT_BE_INSTALLED = 3


def script(path: Path, *lines: str) -> None:
    """Writes a script."""
    path.write_text("\n".join(["#!/bin/sh", *lines, ""]))
    path.chmod(0o755)


def run(command: list[str], **environment: str) -> subprocess.CompletedProcess[str]:
    """Runs a script and waits for its end."""
    return subprocess.run(
        command, capture_output=True, text=True, check=False, timeout=60, env={**os.environ, **environment}
    )


@dataclass
class Checkout:
    """Folder with ``test-vllm.sh``, scripts that install nothing, and a Python that records the suites it runs."""

    home: Path

    def __post_init__(self) -> None:
        shutil.copy(PACKAGE / "test-vllm.sh", self.home)
        for suite in SUITES:
            (self.home / "tests" / suite).mkdir(parents=True)
        (self.home / "tests" / "sglang" / "requirements.txt").write_text("orjson\n")
        self.install_script("vllm-venv.sh", prints=str(self.home / "python"))
        self.install_script("engine-sources.sh", prints="/sources")
        self.install_script("wheel.sh", prints="reprise.whl")
        self.set_test_status(0)

    def install_script(self, name: str, status: int = 0, prints: str = "") -> None:
        """Writes a script that succeeds or fails to install something."""
        script(self.home / name, f"echo '{prints}'", "echo 'the disk is broken' >&2", f"exit {status}")

    def set_test_status(self, status: int) -> None:
        """Sets the exit status of the tests."""
        note = f'basename "$PWD" >> {self.home / "suites"}; exit {status}'
        script(self.home / "python", f'case " $* " in *" pytest "*) {note} ;; esac')

    def test(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        """Runs ``test-vllm.sh``."""
        return run([str(self.home / "test-vllm.sh"), *arguments], REPRISE_CACHE=str(self.home))

    @property
    def suites(self) -> list[str]:
        """Suites that were run."""
        noted = self.home / "suites"
        return noted.read_text().split() if noted.exists() else []


@pytest.fixture
def checkout(tmp_path: Path) -> Checkout:
    return Checkout(tmp_path)


def test_every_suite_is_run_by_default(checkout: Checkout) -> None:
    assert checkout.test().returncode == 0
    assert checkout.suites == list(SUITES)
    assert checkout.test("tier", "-k", "one").returncode == 0
    assert checkout.suites == [*SUITES, "tier"]
    unknown = checkout.test("vlm")
    assert unknown.returncode == 2
    assert "unknown suite vlm" in unknown.stderr


def test_an_engine_that_cannot_be_installed_is_skipped_with_a_message(checkout: Checkout) -> None:
    checkout.install_script("vllm-venv.sh", CANNOT_BE_INSTALLED)
    ended = checkout.test()
    assert (ended.returncode, checkout.suites) == (0, [])
    assert "######## SKIPPED: the tests with a real vLLM engine" in ended.stderr
    assert "the disk is broken" in ended.stderr


def test_suites_whose_sources_cannot_be_fetched_are_skipped_with_a_message(checkout: Checkout) -> None:
    checkout.install_script("engine-sources.sh", CANNOT_BE_INSTALLED)
    ended = checkout.test()
    assert (ended.returncode, checkout.suites) == (0, ["vllm"])
    assert ended.stderr.count("######## SKIPPED: the tests of") == 2


@pytest.mark.parametrize("status", [1, 2, 127])
@pytest.mark.parametrize("name", ["vllm-venv.sh", "engine-sources.sh", "wheel.sh"])
def test_a_failed_installation_fails_the_run(checkout: Checkout, name: str, status: int) -> None:
    checkout.install_script(name, status)
    ended = checkout.test()
    assert ended.returncode != 0
    assert "SKIPPED" not in ended.stderr
    assert not {"tier", "sglang"} & set(checkout.suites)


def test_uninstallable_imports_of_an_engine_fail_the_run(checkout: Checkout) -> None:
    script(checkout.home / "python", 'case " $* " in *" pip "*" -r "*) exit 1 ;; *) exit 0 ;; esac')
    assert checkout.test("tier").returncode == 0
    assert checkout.test("sglang").returncode != 0


def test_failed_tests_fail_the_run(checkout: Checkout) -> None:
    checkout.set_test_status(1)
    for suite in SUITES:
        assert checkout.test(suite).returncode == 1
    assert checkout.suites == list(SUITES)


@dataclass
class Machine:
    """Programs that the installation scripts find on a machine, without a network."""

    home: Path

    def __post_init__(self) -> None:
        self.bin = self.home / "bin"
        self.bin.mkdir()
        self.add_program("uname", "echo x86_64")
        self.add_program("df", "echo Avail", "echo 99999")

    def add_program(self, name: str, *lines: str) -> None:
        """Adds a program."""
        script(self.bin / name, *lines)

    def add_python(self, *lines: str) -> None:
        """Adds a Python that creates an environment whose python has these lines; without lines, it fails."""
        python = "\n".join(["#!/bin/sh", *lines])
        make = [f'mkdir -p "$3/bin" && printf "%s" \'{python}\' > "$3/bin/python" && chmod +x "$3/bin/python"']
        self.add_program("python3", 'if [ "$1" = -c ]; then exit 0; fi', *(make if lines else ["exit 5"]))

    def install(self, name: str, *arguments: str) -> subprocess.CompletedProcess[str]:
        """Runs one of the scripts of the checkout."""
        path = f"{self.bin}:{os.environ['PATH']}"
        return run([str(PACKAGE / name), *arguments], PATH=path, REPRISE_CACHE=str(self.home / "cache"))


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    return Machine(tmp_path)


@pytest.mark.parametrize(
    ("command", "message"),
    [
        (["vllm-venv.sh"], "vLLM cannot be installed: its CPU wheels need x86-64"),
        (["engine-sources.sh", "vllm"], "cannot be fetched: its wheel needs x86-64"),
        (["engine-sources.sh", "sglang"], "cannot be fetched: its wheel needs x86-64"),
    ],
)
def test_another_processor_is_not_supported(machine: Machine, command: list[str], message: str) -> None:
    machine.add_program("uname", "echo aarch64")
    ended = machine.install(*command)
    assert (ended.returncode, ended.stdout) == (CANNOT_BE_INSTALLED, "")
    assert message in ended.stderr


def test_a_full_disk_prevents_the_installation(machine: Machine) -> None:
    machine.add_program("df", "echo Avail", "echo 11999")
    machine.add_python("exit 0")
    ended = machine.install("vllm-venv.sh")
    assert ended.returncode == CANNOT_BE_INSTALLED
    assert "has 11999 MiB free, 12000 are needed" in ended.stderr


def test_missing_packages_prevent_the_installation(machine: Machine) -> None:
    machine.add_python("exit 1")
    ended = machine.install("vllm-venv.sh")
    assert ended.returncode == CANNOT_BE_INSTALLED
    assert "vLLM cannot be installed: pip failed" in ended.stderr


def test_a_failed_creation_of_the_environment_is_an_error(machine: Machine) -> None:
    machine.add_python()
    ended = machine.install("vllm-venv.sh")
    assert ended.returncode not in (0, CANNOT_BE_INSTALLED)


def test_an_installation_is_reused(machine: Machine) -> None:
    machine.add_python("exit 0")
    first = machine.install("vllm-venv.sh")
    assert first.returncode == 0, first.stderr
    (python,) = first.stdout.split()
    assert Path(python).is_relative_to(machine.home / "cache")
    # Nothing is created again.
    machine.add_python()
    assert machine.install("vllm-venv.sh").stdout == first.stdout
