"""Run `swerl agents compat` with every family whose tokenizer is at hand; report in the docs.

`nox -s compat` runs this and passes arguments on. Model folders are put together from
`../shared/tokenizers`: each line's chat template over Qwen3's tokenizer, with GLM's special tokens
added. So the templates are the real ones, and only Qwen3's token counts are. Without that folder
the family `tiny` plays alone.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from swerl.checks.compat.cases import choose_agents

ROOT = Path(__file__).resolve().parents[1]
TOKENIZERS = ROOT / "../shared/tokenizers"
PAGE = ROOT / "docs" / "measurements" / "agent-compat.md"
FIRST = "codex@0.169.0"
"""The agent that meets every family: the fastest that can do everything."""
CHATML = ("<|im_end|>", "<|endoftext|>")
GLM = ("<|user|>", "<|observation|>", "<|endoftext|>")
TEMPLATES = {
    "qwen3": ("qwen3", CHATML),
    "qwen3-coder": ("Qwen3-Coder", CHATML),
    "qwen3-5": ("qwen3_5_think", CHATML),
    "glm4": ("GLM-4.6", GLM),
    "template": ("qwen3_instruct_2507", CHATML),
}
"""Family -> its chat template and the tokens that end a turn."""
GLM_TOKENS = (
    "[gMASK]", "<sop>", "<|system|>", "<|user|>", "<|assistant|>", "<|observation|>",
    "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>",
)  # fmt: skip


def main(arguments: list[str]) -> int:
    """Make the model folders and run the trials; return its exit code."""
    with tempfile.TemporaryDirectory(prefix="swerl-compat-models-") as folder:
        models = Path(folder)
        families = ["tiny"]
        if TOKENIZERS.is_dir():
            spec = _tokenizer()
            for family in TEMPLATES:
                _write_model(models / family, family, spec)
            families = [*TEMPLATES, "tiny"]
        else:
            print(f"no {TOKENIZERS}: only the family tiny is tried")
        names = [f"{one.harness}@{one.release}".rstrip("@") for one in choose_agents(())]
        names.sort(key=lambda name: name != FIRST)
        command = [sys.executable, "-m", "swerl.cli", "agents", "compat", "--models", str(models)]
        command += ["--families", ",".join(families), "--agents", ",".join(names)]
        command += ["--out", str(PAGE), *arguments]
        return subprocess.run(command, check=False).returncode


def _tokenizer() -> dict[str, Any]:
    spec: dict[str, Any] = json.loads((TOKENIZERS / "qwen3" / "tokenizer.json").read_text())
    added = spec["added_tokens"]
    first = max(token["id"] for token in added) + 1
    for number, content in enumerate(GLM_TOKENS):
        added.append({**added[0], "id": first + number, "content": content})
    return spec


def _write_model(folder: Path, family: str, spec: dict[str, Any]) -> None:
    template, stops = TEMPLATES[family]
    ids = {token["content"]: token["id"] for token in spec["added_tokens"]}
    folder.mkdir()
    (folder / "tokenizer.json").write_text(json.dumps(spec))
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": stops[0]}))
    generation = {"eos_token_id": [ids[stop] for stop in stops]}
    (folder / "generation_config.json").write_text(json.dumps(generation))
    shutil.copy(TOKENIZERS / "templates" / f"{template}.jinja", folder / "chat_template.jinja")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
