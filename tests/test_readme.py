"""The README's Python is run as it stands, and its command blocks are the ones that CI runs."""

import re
from pathlib import Path

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")


def test_quickstart_runs(capsys):
    (code,) = re.findall(r"```python\n(.*?)```", README, flags=re.S)
    assert len(code.strip().splitlines()) <= 14
    found: dict = {}
    exec(compile(code, "README.md", "exec"), found)
    result = found["result"]
    assert result.tokens.shape[0] == 2
    assert (result.passes < result.steps).all()
    assert str(tuple(result.tokens.shape)) in capsys.readouterr().out


def test_ci_finds_its_blocks():
    for name in ("first", "test"):
        assert re.search(rf"^<!-- ci: {name} -->\n```bash\n", README, flags=re.M)


def test_every_option_in_the_readme_exists():
    from spot_jax.commands.options import COMMANDS

    fields = {f for command in COMMANDS.values() for f in command.__dataclass_fields__}
    for line in README.splitlines():
        if line.startswith("spot-jax "):
            for option in re.findall(r"--([a-z-]+)", line):
                assert option.replace("-", "_") in fields, option
