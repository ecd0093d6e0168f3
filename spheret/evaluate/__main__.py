"""lm_eval's own command line with `--model spheret` registered: `run --model spheret --model_args run=RUN ...`."""

from __future__ import annotations

from spheret.support.errors import need


def main() -> None:
    need("spheret.evaluate.lm", "eval")
    need("lm_eval.__main__", "eval").cli_evaluate()


if __name__ == "__main__":
    main()
