"""Secrets for tests to plant: eighteen shapes, assembled here so that no scanner takes this file for a leak."""

from __future__ import annotations

FILL = "a1B2c3D4e5F6g7H8i9J0"
SHAPES = {
    "hugging face": "hf" + "_" + FILL,
    "aws": "AK" + "IAIOSFODNN7EXAMPLE",
    "aws session": "AS" + "IAIOSFODNN7EXAMPLE",
    "openai": "sk" + "-proj-" + FILL,
    "github": "gh" + "p_" + FILL * 2,
    "github fine": "github" + "_pat_" + FILL,
    "gitlab": "gl" + "pat-" + FILL,
    "slack": "xo" + "xb-123456789012-" + FILL,
    "google": "AI" + "za" + FILL * 2,
    "nvidia": "nv" + "api-" + FILL * 2,
    "wandb": "wandb" + "_v1_" + FILL * 2,
    "groq": "gs" + "k_" + FILL * 2,
    "npm": "np" + "m_" + FILL * 2,
    "vault": "hv" + "s.CAESI" + FILL,
    "digitalocean": "do" + "p_v1_" + "0123456789abcdef" * 4,
    "sendgrid": "S" + "G." + FILL + "." + FILL * 2,
    "jwt": "ey" + "JhbGciOiJIUzI1NiJ9.ey" + "JzdWIiOiIxMjM0In0." + FILL,
    "bearer": "Bearer " + FILL,
}
