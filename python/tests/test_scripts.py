"""The scripts that run the tests of engines skip what cannot be installed here, loudly, and fail on everything else."""

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
    """Runs a script to its end."""
    return subprocess.run(
        command, capture_output=True, text=True, check=False, timeout=60, env={**os.environ, **environment}
    )


@dataclass
class Checkout:
    """``test-vllm.sh`` among scripts that install nothing, and a Python that notes which suites it runs."""

    home: Path

    def __post_init__(self) -> None:
        shutil.copy(PACKAGE / "test-vllm.sh", self.home)
        for suite in SUITES:
            (self.home / "tests" / suite).mkdir(parents=True)
        (self.home / "tests" / "sglang" / "requirements.txt").write_text("orjson\n")
        self.installs("vllm-venv.sh", prints=str(self.home / "python"))
        self.installs("engine-sources.sh", prints="/sources")
        self.installs("wheel.sh", prints="reprise.whl")
        self.python_ends_with(0)

    def installs(self, name: str, status: int = 0, prints: str = "") -> None:
        """A script that installs something, or does not."""
        script(self.home / name, f"echo '{prints}'", "echo 'why it does not' >&2", f"exit {status}")

    def python_ends_with(self, status: int) -> None:
        """What comes of the tests."""
        note = f'basename "$PWD" >> {self.home / "suites"}; exit {status}'
        script(self.home / "python", f'case " $* " in *" pytest "*) {note} ;; esac')

    def test(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        """Runs ``test-vllm.sh``."""
        return run([str(self.home / "test-vllm.sh"), *arguments], REPRISE_CACHE=str(self.home))

    @property
    def suites(self) -> list[str]:
        """What was run."""
        noted = self.home / "suites"
        return noted.read_text().split() if noted.exists() else []


@pytest.fixture
def checkout(tmp_path: Path) -> Checkout:
    return Checkout(tmp_path)


def test_every_suite_is_run_unless_one_is_named(checkout: Checkout) -> None:
    assert checkout.test().returncode == 0
    assert checkout.suites == list(SUITES)
    assert checkout.test("tier", "-k", "one").returncode == 0
    assert checkout.suites == [*SUITES, "tier"]
    unknown = checkout.test("vlm")
    assert unknown.returncode == 2
    assert "there is no suite vlm" in unknown.stderr


def test_an_engine_that_cannot_be_installed_is_skipped_loudly(checkout: Checkout) -> None:
    checkout.installs("vllm-venv.sh", CANNOT_BE_INSTALLED)
    ended = checkout.test()
    assert (ended.returncode, checkout.suites) == (0, [])
    assert "######## SKIPPED: the tests with a real vLLM engine" in ended.stderr
    assert "why it does not" in ended.stderr


def test_sources_that_cannot_be_had_skip_their_suites_loudly(checkout: Checkout) -> None:
    checkout.installs("engine-sources.sh", CANNOT_BE_INSTALLED)
    ended = checkout.test()
    assert (ended.returncode, checkout.suites) == (0, ["vllm"])
    assert ended.stderr.count("######## SKIPPED: the tests of") == 2


@pytest.mark.parametrize("status", [1, 2, 127])
@pytest.mark.parametrize("name", ["vllm-venv.sh", "engine-sources.sh", "wheel.sh"])
def test_an_installation_that_goes_wrong_fails_the_run(checkout: Checkout, name: str, status: int) -> None:
    checkout.installs(name, status)
    ended = checkout.test()
    assert ended.returncode != 0
    assert "SKIPPED" not in ended.stderr
    assert not {"tier", "sglang"} & set(checkout.suites)


def test_imports_of_an_engine_that_cannot_be_installed_fail_the_run(checkout: Checkout) -> None:
    script(checkout.home / "python", 'case " $* " in *" pip "*" -r "*) exit 1 ;; *) exit 0 ;; esac')
    assert checkout.test("tier").returncode == 0
    assert checkout.test("sglang").returncode != 0


def test_tests_that_fail_fail_the_run(checkout: Checkout) -> None:
    checkout.python_ends_with(1)
    for suite in SUITES:
        assert checkout.test(suite).returncode == 1
    assert checkout.suites == list(SUITES)


@dataclass
class Machine:
    """What the installing scripts find on a machine, without a network."""

    home: Path

    def __post_init__(self) -> None:
        self.bin = self.home / "bin"
        self.bin.mkdir()
        self.has("uname", "echo x86_64")
        self.has("df", "echo Avail", "echo 99999")

    def has(self, name: str, *lines: str) -> None:
        """A program."""
        script(self.bin / name, *lines)

    def python_makes(self, *lines: str) -> None:
        """A Python that makes an environment with a python of these lines, where there are any."""
        made = "\n".join(["#!/bin/sh", *lines])
        make = [f'mkdir -p "$3/bin" && printf "%s" \'{made}\' > "$3/bin/python" && chmod +x "$3/bin/python"']
        self.has("python3", 'if [ "$1" = -c ]; then exit 0; fi', *(make if lines else ["exit 5"]))

    def install(self, name: str, *arguments: str) -> subprocess.CompletedProcess[str]:
        """Runs one of the scripts of the checkout."""
        path = f"{self.bin}:{os.environ['PATH']}"
        return run([str(PACKAGE / name), *arguments], PATH=path, REPRISE_CACHE=str(self.home / "cache"))


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    return Machine(tmp_path)


@pytest.mark.parametrize(
    ("command", "words"),
    [
        (["vllm-venv.sh"], "vLLM cannot be installed: its CPU wheels are for x86-64 here"),
        (["engine-sources.sh", "vllm"], "cannot be had: its wheel is for x86-64 here"),
        (["engine-sources.sh", "sglang"], "cannot be had: its wheel is for x86-64 here"),
    ],
)
def test_another_processor_cannot_have_it(machine: Machine, command: list[str], words: str) -> None:
    machine.has("uname", "echo aarch64")
    ended = machine.install(*command)
    assert (ended.returncode, ended.stdout) == (CANNOT_BE_INSTALLED, "")
    assert words in ended.stderr


def test_a_full_disk_cannot_have_it(machine: Machine) -> None:
    machine.has("df", "echo Avail", "echo 11999")
    machine.python_makes("exit 0")
    ended = machine.install("vllm-venv.sh")
    assert ended.returncode == CANNOT_BE_INSTALLED
    assert "has 11999 MiB left, 12000 are needed" in ended.stderr


def test_where_packages_do_not_come_it_cannot_be_installed(machine: Machine) -> None:
    machine.python_makes("exit 1")
    ended = machine.install("vllm-venv.sh")
    assert ended.returncode == CANNOT_BE_INSTALLED
    assert "vLLM cannot be installed: pip failed" in ended.stderr


def test_an_environment_that_cannot_be_made_is_a_failure(machine: Machine) -> None:
    machine.python_makes()
    ended = machine.install("vllm-venv.sh")
    assert ended.returncode not in (0, CANNOT_BE_INSTALLED)


def test_an_installation_is_used_again(machine: Machine) -> None:
    machine.python_makes("exit 0")
    first = machine.install("vllm-venv.sh")
    assert first.returncode == 0, first.stderr
    (python,) = first.stdout.split()
    assert Path(python).is_relative_to(machine.home / "cache")
    # Nothing of it is made anew.
    machine.python_makes()
    assert machine.install("vllm-venv.sh").stdout == first.stdout
