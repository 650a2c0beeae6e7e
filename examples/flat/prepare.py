"""Make ``train.bin`` and ``val.bin`` of a text: ``python prepare.py input.txt data``."""

import json
import sys
from pathlib import Path

import numpy as np

text, folder = Path(sys.argv[1]).read_text(encoding="utf-8"), Path(sys.argv[2])
characters = sorted(set(text))
numbers = {character: number for number, character in enumerate(characters)}
tokens = np.array([numbers[character] for character in text], dtype=np.uint16)
folder.mkdir(parents=True, exist_ok=True)
tokens[: len(tokens) * 9 // 10].tofile(folder / "train.bin")
tokens[len(tokens) * 9 // 10 :].tofile(folder / "val.bin")
(folder / "meta.json").write_text(json.dumps({"vocab_size": len(characters)}))
print(f"{len(tokens)} characters, {len(characters)} different ones, in {folder}")
