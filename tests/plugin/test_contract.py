"""Every name of Megatron and torch that we rely on is in one table, and is there as expected."""

import ast
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

from dynatrain_megatron import platform
from dynatrain_megatron.errors import HostMismatch
from dynatrain_megatron.platform.versions import Releases, megatron_release, problem_of
from dynatrain_megatron.plugin import contract, hooks
from dynatrain_megatron.plugin.contract import CALLED, HostName, Use
from tests.composed import config_of

PACKAGE = Path(contract.__file__).parents[1]


def called() -> set[str]:
    """Names of Megatron that the sources import, or take from a module of it that they import."""
    return {
        name
        for path in PACKAGE.rglob("*.py")
        for name in names_in(ast.parse(path.read_text(encoding="utf-8")))
    }


def names_in(tree: ast.Module) -> Iterator[str]:
    modules: dict[str, str] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] == "megatron":
            for alias in node.names:
                full = f"{node.module}.{alias.name}"
                if alias.name in MODULES:
                    modules[alias.asname or alias.name] = full
                else:
                    yield full
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
            module = modules.get(node.value.id)
            if module is not None:
                yield f"{module}.{node.attr}"


# Modules of Megatron that the sources import whole, by their last name.
MODULES = {
    *("argument_utils", "arguments", "data_samplers", "distrib_optimizer", "global_vars"),
    "mpu",
    *("num_microbatches_calculator", "parallel_state", "random", "tensor_parallel", "training"),
}


def test_the_reader_of_sources_finds_names_of_both_kinds() -> None:
    source = "from megatron.core import mpu as m\nfrom megatron.x import y\nm.f()\nm.g"
    assert set(names_in(ast.parse(source))) == {
        "megatron.core.mpu.f", "megatron.core.mpu.g", "megatron.x.y"
    }  # fmt: skip


def test_every_name_that_the_sources_call_is_in_the_table() -> None:
    listed = {name.name for name in CALLED}
    assert called() - listed == set()


def test_every_name_is_listed_once_for_each_use_with_a_reason() -> None:
    platform.install("cpu")
    rows = Counter((name.name, name.use) for name in contract.table())
    assert [row for row, count in rows.items() if count > 1] == []
    assert all(len(name.reason) > 5 for name in contract.table())
    assert {name.use for name in contract.table()} == set(Use)


@pytest.mark.host
def test_the_installed_megatron_and_torch_have_every_name() -> None:
    platform.install("cpu")
    assert contract.problems(contract.table(), megatron_release()) == {}
    assert contract.worlds_problem() is None


@pytest.mark.host
def test_hooks_name_parameters_that_the_functions_take() -> None:
    platform.install("cpu")
    for hook in hooks.HOOKS:
        if megatron_release() in hook.releases:
            assert problem_of(f"{hook.module}.{hook.name}", hook.parameters) is None


def test_problems_are_told_apart() -> None:
    assert problem_of("json.dumps", ("obj", "indent")) is None
    assert problem_of("json.decoder.JSONDecoder.decode") is None
    assert problem_of("json.dumps", ("obj", "layout")) == "json.dumps takes no layout"
    assert "json.dance is missing" in str(problem_of("json.dance"))
    assert "json.nowhere.dumps is missing" in str(problem_of("json.nowhere.dumps"))
    assert "no_such_host.x is missing" in str(problem_of("no_such_host.x"))
    assert problem_of("json.decoder", ("obj",)) == "json.decoder is no function"


def test_a_package_that_the_host_misses_is_named(tmp_path: Path, monkeypatch) -> None:
    (tmp_path / "hungry_host.py").write_text("import no_such_package.inner\n")
    monkeypatch.syspath_prepend(tmp_path)
    problem = problem_of("hungry_host.work")
    assert problem is not None and problem.endswith("pip install no_such_package")


def test_layouts_do_not_change_on_releases_that_are_too_old(monkeypatch) -> None:
    platform.install("cpu")
    monkeypatch.setattr(hooks, "megatron_release", lambda: (0, 17))
    with pytest.raises(HostMismatch, match="layouts change from megatron-core"):
        hooks.attach(config_of(["target=tp2", "switch_at=3"]))


def test_names_of_other_releases_are_left_out() -> None:
    gone = HostName("json.gone", Use.switch, "went away", releases=Releases(before=(0, 18)))
    new = HostName("json.new", Use.switch, "came", releases=Releases(since=(0, 20)))
    assert contract.problems([gone, new], (0, 19)) == {}
    assert list(contract.problems([gone, new], (0, 17))) == [gone]
    assert list(contract.problems([gone, new], (0, 20))) == [new]
    assert (0, 18) in Releases((0, 18), (0, 19)) and (0, 19) not in Releases((0, 18), (0, 19))
