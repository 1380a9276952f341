"""What pages say that can be looked up: links, names, tables, refusals, blocks of other kinds."""

from __future__ import annotations

import ast
import itertools
import re
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
import yaml

from dynatrain_megatron.config import _ALLOWED, DynaTrainConfig, ElasticConfig, EngineConfig
from dynatrain_megatron.planner import read_topology_file
from tests.docs.commands import Wrong, called, check
from tests.docs.generated import generated
from tests.docs.pages import ROOT, Block, Page, page, pages

_LINK = re.compile(r"\]\((?!https?:)([^)\s]+)\)")
_PATH = re.compile(r"(?:tests|docs|benchmarks|scripts|patches|dynatrain_megatron)/[\w./-]+\w")
_INDEX = "docs/README.md"


def test_what_is_generated_is_up_to_date(request: pytest.FixtureRequest) -> None:
    for path, wanted in generated().items():
        if request.config.getoption("--write-docs"):
            path.parent.mkdir(exist_ok=True)
            path.write_text(wanted)
        known = path.read_text() if path.exists() else ""
        assert known == wanted, f"{path.relative_to(ROOT)}: run pytest tests/docs --write-docs"


# ---------------------------------------------------------------- links and names


def _anchors(text: str) -> set[str]:
    """The anchors of a page's headings, as GitHub makes them."""
    heads = re.findall(r"^#+ (.+)$", text, re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", head.lower()).strip().replace(" ", "-") for head in heads}


def test_every_link_leads_somewhere() -> None:
    for one in pages():
        here = ROOT / one.name
        for link in _LINK.findall(one.prose):
            path, _, anchor = link.partition("#")
            target = (here.parent / path).resolve() if path else here
            assert target.exists(), f"{one.name}: {link} leads nowhere"
            if anchor:
                assert anchor in _anchors(target.read_text()), f"{one.name}: {link} has no anchor"


def test_every_page_is_in_the_index() -> None:
    linked = {link.partition("#")[0] for link in _LINK.findall(page(_INDEX).prose)}
    there = {path.name for path in (ROOT / "docs").glob("*.md")} - {"README.md"}
    assert there <= linked, f"{_INDEX} lacks {', '.join(sorted(there - linked))}"


def test_every_path_that_is_named_exists() -> None:
    for one in pages():
        for span in one.spans:
            if _PATH.fullmatch(span.partition("::")[0].rstrip("*")):
                path, _, name = span.partition("::")
                assert list(ROOT.glob(path)), f"{one.name}: there is no `{path}`"
                if name:
                    source = (ROOT / path).read_text()
                    assert f"def {name.partition('[')[0]}(" in source, f"{one.name}: `{span}`"


# ---------------------------------------------------------------- settings


def _defaults() -> Iterator[tuple[str, Any]]:
    for prefix, kind in (("", DynaTrainConfig), ("engine.", EngineConfig),
                         ("elastic.", ElasticConfig)):  # fmt: skip
        for field in fields(kind):
            yield f"{prefix}{field.name}", field.default


def test_every_setting_has_a_row_with_its_default() -> None:
    rows: dict[str, str] = {}
    for line in page("docs/config.md").text.splitlines():
        cells = re.split(r"(?<!\\) \| ", line.strip("| "))
        if line.startswith("| `") and len(cells) == 3:
            names = re.findall(r"`([^`]+)`", cells[0])
            defaults = cells[2].split(", ") if len(names) > 1 else [cells[2]]
            rows |= zip(names, itertools.islice(itertools.cycle(defaults), len(names)), strict=True)
    told_elsewhere = {"model", "experiment", "cfg"}
    missing = set(_ALLOWED) - set(rows) - told_elsewhere
    assert not missing, f"docs/config.md has no row for {', '.join(sorted(missing))}"
    for key, default in _defaults():
        if key in rows:
            shown = rows[key].strip("`")
            wanted = "none" if default in (None, ()) else str(default)
            if isinstance(default, bool):
                wanted = wanted.lower()
            elif isinstance(default, float):
                wanted = f"{default:g}"
            assert shown == wanted, f"docs/config.md: the default of {key} is {wanted}, not {shown}"


# ---------------------------------------------------------------- refusals


def _refusals() -> Iterator[tuple[str, str]]:
    """Where a switch is refused, and the message, with X for each value."""
    for path in sorted((ROOT / "dynatrain_megatron").rglob("*.py")):
        name = str(path.relative_to(ROOT / "dynatrain_megatron"))
        room = name.partition("/")[0]
        text = path.read_text()
        if not re.search(r"\b(SwitchRefused|LayoutError)\(", text):
            continue
        for function, call in _calls(ast.parse(text)):
            raised = getattr(call.func, "id", "")
            is_rule = raised == "LayoutError" and (
                room == "adapters"
                or (name == "layout.py" and function in _RULES)
            )  # fmt: skip
            if (raised == "SwitchRefused" or is_rule) and call.args:
                message = _literal(call.args[0])
                if message is not None:
                    yield f"{name}:{call.lineno}", message


_RULES = ("_check_tensor_axis", "_check_expert_axes", "_check_degrees", "_check_grids_agree",
          "_must_divide", "_data_degree", "derive")  # fmt: skip


def _calls(tree: ast.Module) -> Iterator[tuple[str, ast.Call]]:
    for function in ast.walk(tree):
        if isinstance(function, ast.FunctionDef):
            for node in ast.walk(function):
                if isinstance(node, ast.Call):
                    yield function.name, node


def _literal(node: ast.expr) -> str | None:
    if isinstance(node, ast.Constant):
        return str(node.value)
    if isinstance(node, ast.JoinedStr):
        return "".join(
            str(part.value) if isinstance(part, ast.Constant) else "X" for part in node.values
        )
    return None


def test_every_refusal_is_on_the_page() -> None:
    """A span such as ``dp=… must be …`` stands for the messages that begin so."""
    spans = [span.replace("\\|", "|") for span in page("docs/when-it-fails.md").spans]
    known = [
        re.compile("(?s:.*)".join(re.escape(part) for part in re.split(r"\s*…\s*", span)))
        for span in spans
        if len(re.sub(r"[…\W]", "", span)) >= 8
    ]
    found = list(_refusals())
    assert len(found) > 40
    for where, message in found:
        assert any(pattern.match(message) for pattern in known), (
            f"docs/when-it-fails.md does not say what to do about {message!r} ({where})"
        )


# ---------------------------------------------------------------- blocks of other kinds


def _blocks(language: str) -> list[Block]:
    return [block for one in pages() for block in one.blocks if block.language == language]


@pytest.mark.parametrize("block", _blocks("python"), ids=str)
def test_a_block_of_python_runs(block: Block) -> None:
    exec(compile(block.text, str(block), "exec"), {})


@pytest.mark.parametrize("block", _blocks("yaml"), ids=str)
def test_a_block_of_yaml_is_read(block: Block, tmp_path: Path) -> None:
    """A topology file by its reader; of objects of Kubernetes every command is held to be one."""
    documents = list(yaml.safe_load_all(block.text))
    if "kind" not in documents[0]:
        file = tmp_path / "topology.yaml"
        file.write_text(block.text)
        assert read_topology_file(str(file))
        return
    for document in documents:
        for command in _commands_of(document):
            try:
                for one in called(command[2]) if command[:2] == ["sh", "-c"] else [tuple(command)]:
                    check(one)
            except Wrong as wrong:
                pytest.fail(f"{block}: {wrong}")


def _commands_of(node: Any) -> Iterator[list[str]]:
    if isinstance(node, dict):
        if "command" in node:
            yield [*node["command"], *node.get("args", [])]
        for value in node.values():
            yield from _commands_of(value)
    elif isinstance(node, list):
        for value in node:
            yield from _commands_of(value)


def test_objects_of_kubernetes_name_each_other() -> None:
    """Who joins finds the store, and pods their services, settings and volumes."""
    blocks = [block for block in _blocks("yaml") if block.page == "docs/kubernetes.md"]
    found = [each for block in blocks for each in yaml.safe_load_all(block.text)]
    named = {(each["kind"], each["metadata"]["name"]): each for each in found}
    assert len(named) == len(found)
    services = {name for kind, name in named if kind == "Service"}
    labels = [each["metadata"].get("labels") for each in found if each["kind"] == "Pod"]
    for (kind, _), each in named.items():
        template = each["spec"].get("template") if kind in ("Job", "StatefulSet") else None
        if template is None:
            continue
        labels.append(template.get("metadata", {}).get("labels"))
        for command in _commands_of(template):
            for host in re.findall(r"elastic\.(?:store|join)=([\w-]+):29400", " ".join(command)):
                assert host in services
        for container in template["spec"]["containers"]:
            for source in container["envFrom"]:
                assert ("ConfigMap", source["configMapRef"]["name"]) in named
            mounts = {mount["name"] for mount in container["volumeMounts"]}
            assert mounts == {volume["name"] for volume in template["spec"]["volumes"]}
    for name in services:
        assert named["Service", name]["spec"]["selector"] in labels
    assert named["StatefulSet", "joiners"]["spec"]["serviceName"] in services


# ---------------------------------------------------------------- the tests themselves


def test_pages_are_taken_apart() -> None:
    text = "# A\n`x`\n```bash run exit=1\n`y`\n```\n\n```output\nz\n```\n``` \nno end"
    from tests.docs.pages import _blocks as blocks
    from tests.docs.pages import _with_outputs

    one = Page("a.md", text, tuple(_with_outputs(blocks("a.md", text))))
    assert [(b.language, b.words, b.text, b.output) for b in one.blocks] == [
        ("bash", ("run", "exit=1"), "`y`", "z"),
        ("", (), "no end", None),
    ]
    assert one.spans == ["x"] and one.blocks[0].value("exit") == "1"
