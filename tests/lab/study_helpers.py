"""Plans and results of studies that were never trained: losses are a function of what was asked for."""

import hashlib
import math

from spheret.lab.plan import read_plan
from spheret.lab.rows import Key, Row
from spheret.lab.stages import wanted

HEAD = 'title = "A trial"\n'
TWO = """
[[parts]]
name = "two"
contestants = ["pre-ln", "post-ln"]
rates = [1e-3, 2e-3, 4e-3]
"""


def written(folder, text):
    path = folder / "plan.toml"
    path.write_text(HEAD + text)
    return path


def plan_of(folder, text=TWO):
    return read_plan(written(folder, text))


def noise(*words):
    """A number between -1 and 1 that follows from the words."""
    digest = hashlib.sha256(repr(words).encode()).digest()
    return int.from_bytes(digest[:4]) / 2**31 - 1


def row(key, loss, state="finished", **fields):
    values = {
        "reason": "" if state == "finished" else f"step 3: {state}",
        "train_loss": loss, "steps": 10, "tokens": 1000, "flops": 10**6, "seconds": 2.0,
        "curve": [(5, None if loss is None else loss + 0.5), (10, loss)], "run": f"run-{key.seed}", "commit": None,
        "torch": "2", "processor": None, "threads": 1, "step_seconds": 0.1,
        "unigram_entropy": None,
    }  # fmt: skip
    return Row(**key._asdict(), state=state, val_loss=loss, **{**values, **fields})


def bowl(best, floor=2.0, deviation=0.01):
    """A loss that is lowest at the rate `best`. Seeds add noise: a common one, and one of their own."""

    def loss(key):
        own = deviation * noise(key.contestant, key.rate, key.seed) / 2
        return floor + 0.1 * math.log2(key.rate / best) ** 2 + deviation * noise(key.seed) + own

    return loss


def run_all(plan, loss_of, most=10_000):
    """Run a study to its end. Returns the rows and the order in which they were made."""
    rows, order = {}, []
    while keys := wanted(plan, rows):
        key = keys[0]
        result = loss_of(key)
        rows[key] = result if isinstance(result, Row) else row(key, result)
        order.append(key)
        assert len(order) <= most
    return rows, order


def key(contestant, rate, seed, group="two"):
    return Key(group, contestant, rate, seed)
