"""Ray is optional: features that need it say how to install it, and exit with the code of a user error."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from rollgraph import Trainer
from rollgraph.cli import main
from rollgraph.config import ConfigError, to_yaml
from tests.test_train import config_of, folder

__all__ = ["folder"]


@pytest.mark.parametrize(
    ("overrides", "key"),
    [
        (["cluster.engine=ray"], "cluster.engine: ray"),
        (["reward.place=cluster", "reward.workers=1"], "reward.place: cluster"),
    ],
)
def test_without_ray_the_command_says_what_to_install(
    folder: Path,
    overrides: list[str],
    key: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    (folder / "run.yaml").write_text(to_yaml(config_of(folder, *overrides)))
    assert main(["train", str(folder / "run.yaml")]) == 2
    assert f"{key} needs Ray, which cannot be imported" in (error_text := capsys.readouterr().err)
    assert "pip install 'rollgraph[ray]'" in error_text


def test_a_script_is_referred_to_the_command(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"cluster\.engine: ray starts ranks on a cluster.*rollgraph train"):
        Trainer(
            {"tiny": {}},
            [{"prompt": "1+1="}],
            rewards=[lambda completions, **_: [0.0] * len(completions)],
            max_tokens=8,
            output=str(tmp_path / "run"),
            cluster={"engine": "ray"},
        )
