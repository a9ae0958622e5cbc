"""`kvspec calibrate`."""

from io import BytesIO
from pathlib import Path

from rich.console import Console

from models_integration.cache.atomic_file import publish_readable
from models_integration.policies.calibration import calibrate
from models_integration.studies.subject import load_subject
from reference.calibration import save_calibration
from spec.errors import SpecError

__all__ = ["run"]


def run(text: Path, out: Path, tokens: int, model: str) -> None:
    """Read a text with a model, and write what its queries are like."""
    try:
        read = text.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise SpecError("TEXT", str(text), f"must be a readable text file: {error}") from error
    if tokens < 1:
        raise SpecError("tokens", tokens, "must be at least 1")
    subject = load_subject(model, "numpy")
    ids = subject.tokenizer(read, return_tensors="pt").input_ids[:, :tokens].to(subject.model.device)
    calibration = calibrate(subject.model, ids)
    file = BytesIO()
    save_calibration(calibration, file)
    publish_readable(out, file.getvalue())
    layers, heads, d = calibration.mean.shape
    Console().print(
        f"{out}: {calibration.digest}, {ids.shape[1]} tokens, {layers} layers of {heads} heads of {d} channels;"
        f" model {calibration.identity.model}, rotation {calibration.identity.rope}"
    )
