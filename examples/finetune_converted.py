"""Fine-tune a converted GPT-2 beside its control: the original, with the same batches and settings.

python examples/finetune_converted.py gpt2 my.txt --out finetuned
"""

import argparse
import math
from pathlib import Path

from transformers import AutoModelForCausalLM, AutoTokenizer, Trainer, TrainingArguments

import spheret
from spheret.conversion import trainer_callback


def windows(tokenizer, text, block):
    """Rows of `block` tokens: nine in ten for training, the rest for validation."""
    ids = tokenizer(text, return_tensors="pt", verbose=False)["input_ids"][0]
    rows = [{"input_ids": row, "labels": row} for row in ids[: len(ids) // block * block].view(-1, block)]
    cut = max(1, len(rows) // 10)
    return rows[:-cut], rows[-cut:]


def finetune(name, text, out, steps=300, block=128, batch_size=8):
    """The validation losses before and after, of the control and of the converted model."""
    tokenizer = AutoTokenizer.from_pretrained(name)
    train, validation = windows(tokenizer, text, block)
    losses = {}
    for arm in ("control", "converted"):
        model = AutoModelForCausalLM.from_pretrained(name, use_safetensors=True)
        callbacks = []
        if arm == "converted":
            # the step sizes are fitted on the first rows
            spheret.convert(model, batches=[{"input_ids": row["input_ids"][None]} for row in train[:32]])
            # over three tenths of the steps, t moves from the original to the scheme
            callbacks = [trainer_callback(steps=math.ceil(0.3 * steps))]
        arguments = TrainingArguments(
            output_dir=str(Path(out) / arm), max_steps=steps, per_device_train_batch_size=batch_size,
            learning_rate=3e-4, warmup_steps=steps // 20, weight_decay=0.1, save_strategy="no", report_to=[], seed=0,
        )  # fmt: skip
        trainer = Trainer(model, arguments, train_dataset=train, eval_dataset=validation, callbacks=callbacks)
        before = trainer.evaluate()["eval_loss"]
        trainer.train()
        losses[arm] = before, trainer.evaluate()["eval_loss"]
        # spheret.hub.load opens the converted one
        trainer.save_model()
    return losses


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", help="a directory or a name on the hub")
    parser.add_argument("text", type=Path)
    parser.add_argument("--out", default="finetuned")
    parser.add_argument("--steps", type=int, default=300)
    words = parser.parse_args()
    for arm, (before, after) in finetune(words.model, words.text.read_text(), words.out, words.steps).items():
        print(f"{arm:<10} {before:.4f} before, {after:.4f} after")
