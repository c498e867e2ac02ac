"""A tiny model learns to shout and to whisper, in seconds: `python examples/shout.py`."""

from rollgraph import Trainer

WORDS = ["apple", "bread", "chair", "dream", "earth", "flame", "grass", "house", "island", "jacket", "kettle", "lemon"]
STYLES = {"Shout": str.isupper, "Whisper": str.islower}
rows = [{"prompt": f"{style} {word}:", "style": style} for word in WORDS for style in STYLES]


def right_case(completions, style, **columns):
    """The share of letters in the right case. Each column of the data is an argument."""
    return [share(text, STYLES[name]) for text, name in zip(completions, style, strict=True)]


def share(text, fits):
    return sum(map(fits, text)) / max(1, len(text))


trainer = Trainer(
    model={"tiny": {"layers": 2, "width": 64, "heads": 4, "kv_heads": 2, "mlp": 128, "max_length": 48}},
    train=rows[:-4],
    validation=rows[-4:],  # words that it is not trained on
    rewards=right_case,
    output="runs/shout",
    prompts_per_step=8,
    max_prompt_tokens=32,
    samples_per_prompt=8,
    max_tokens=8,
    rows=64,
    lr=3e-3,  # large, because the model is tiny
    token_buckets=[512],
    cpu_threads=1,
    validation_every=20,
    validation_temperature=1.0,
)
run = trainer.train(steps=50)
for prompt in ("Shout river:", "Whisper river:"):
    print(prompt, run.generate(prompt))
