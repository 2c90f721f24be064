"""Fine-tune a model folder with LoRA in a swarm: only the adapters travel. pip install 'decentral[lora]'

    python examples/lora.py --model path/to/model --text my.txt
    decentral join INVITE --script examples/lora.py -- --model path/to/model --text theirs.txt

All peers have the same base, a folder that transformers opens: it is compared before anything is trained, and another
one is refused with the tensor that differs. The adapters end in OUT/adapter, as peft saves them.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import torch
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM, AutoTokenizer

import decentral
from decentral import Manifest, preset_manifest

LEARNING_RATE = 1e-2


def terms(rounds: int) -> Manifest:
    """What all peers agree on. Adapters are small: they go whole, in 8 bits, every 10 steps."""
    inner = {"steps": 10, "learning_rate": LEARNING_RATE, "weight_decay": 0.0}
    return preset_manifest("diloco", run={"name": "lora", "rounds": rounds}, model={"task": "custom"}, inner=inner)


def main() -> None:
    """Train until the run is over."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", required=True, help="folder of the base model, with its tokenizer")
    parser.add_argument("--text", type=Path, required=True, help="what this peer fine-tunes on")
    parser.add_argument("--seed", type=int, default=0, help="of the order of this peer's data")
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--context", type=int, default=32, help="tokens that the model sees at once")
    parser.add_argument("--out", default="decentral-lora", help="run directory")
    chosen = parser.parse_args()

    torch.manual_seed(0)
    base = AutoModelForCausalLM.from_pretrained(chosen.model)
    kind = LoraConfig(r=4, lora_alpha=8, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM")
    model = get_peft_model(base, kind)  # freezes the base: what is frozen never crosses
    optimizer = torch.optim.AdamW((p for p in model.parameters() if p.requires_grad), LEARNING_RATE, weight_decay=0.0)
    token_N = AutoTokenizer.from_pretrained(chosen.model)(chosen.text.read_text(), return_tensors="pt")["input_ids"][0]
    random = torch.Generator().manual_seed(chosen.seed)
    with decentral.join(terms(chosen.rounds), model, optimizer, out=chosen.out) as peer:
        print(f"decentral join {peer.invite} --script {sys.argv[0]}", flush=True)
        while not peer.done:
            starts = torch.randint(len(token_N) - chosen.context, (8, 1), generator=random)
            token_BT = token_N[starts + torch.arange(chosen.context)]
            loss = model(input_ids=token_BT, labels=token_BT).loss
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            peer.log(loss=loss)
    model.save_pretrained(f"{chosen.out}/adapter")
    print(f"{chosen.out}/adapter: open it with PeftModel.from_pretrained(base, ...)")


if __name__ == "__main__":
    main()
