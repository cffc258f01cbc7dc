"""What the package promises from outside: its version, its types, its public names."""

from __future__ import annotations

import importlib.metadata
import importlib.resources
import inspect
import re
import tomllib
from pathlib import Path

import pytest

import aiordma

ROOT = Path(__file__).parents[2]


def test_one_version() -> None:
    """pyproject.toml, the installed package, the module and the changelog's newest entry name one version."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    newest = re.search(r"^## (\S+)", (ROOT / "CHANGELOG.md").read_text(encoding="utf-8"), re.MULTILINE)
    assert newest is not None
    assert {
        "pyproject.toml": project["version"],
        "installed": importlib.metadata.version("aiordma"),
        "changelog": newest[1],
    } == dict.fromkeys(("pyproject.toml", "installed", "changelog"), aiordma.__version__)


def test_attrs_is_the_only_dependency() -> None:
    """Whoever installs aiordma without extras gets attrs, and nothing else."""
    required = [item for item in importlib.metadata.requires("aiordma") or [] if "extra ==" not in item]
    assert [re.split(r"\W", item)[0] for item in required] == ["attrs"]


def test_types_are_shipped() -> None:
    """The marker of PEP 561 lies in the package."""
    assert importlib.resources.files(aiordma).joinpath("py.typed").is_file()


def test_public_names_are_sorted() -> None:
    """`__all__` has each name once: constants, then classes, then functions, each in the alphabet's order."""

    def key(name: str) -> tuple[int, str]:
        return (0 if name.isupper() else 1 if name[0].isupper() else 2, name)

    assert aiordma.__all__ == sorted(set(aiordma.__all__), key=key)


def test_public_face_is_complete() -> None:
    """Every public name that the package binds is in `__all__`, submodules aside."""
    bound = {
        name
        for name, value in vars(aiordma).items()
        if not name.startswith("_") and not inspect.ismodule(value) and name != "annotations"
    }
    assert bound == set(aiordma.__all__)


@pytest.mark.parametrize("name", aiordma.__all__)
def test_public_name_is_documented(name: str) -> None:
    """Every public name can be imported, and what it names has a docstring of its own."""
    value = getattr(aiordma, name)
    assert inspect.isclass(value) or inspect.isfunction(value), f"{name} is data: say how it is documented"
    assert value.__doc__, f"{name} has no docstring"
    assert inspect.cleandoc(value.__doc__).split("\n")[0].endswith((".", ":")), f"{name}: not a sentence"
