"""The demo that `vescale-fsdp train` runs: a byte-level GPT on real text, the same under four engines.

Reading order: settings, data, model, engines, optimizers, meter, loop, progress, report, launch, run.
"""

__all__: list[str] = []
