"""`kvspec calibrate`."""

from io import BytesIO
from pathlib import Path

from rich.console import Console

from models_integration.cache.atomic_file import publish_readable
from models_integration.cli.checks import check_file, read_text
from models_integration.policies.calibration import calibrate
from models_integration.studies.subject import Loading
from reference.calibration import save_calibration
from spec.errors import SpecError

__all__ = ["run"]


def run(text: Path, out: Path, tokens: int, loading: Loading) -> None:
    """Read a text with a model, and write what its queries are like. Where anything is refused, `out` stays as it is.

    Raises:
        SpecError: for a text without a token, a file that cannot be written, or what the model cannot serve.
    """
    read = read_text("TEXT", text)
    if tokens < 1:
        raise SpecError("tokens", tokens, "must be at least 1")
    check_file("out", out)
    subject = loading.subject()
    if not subject.tokenizer(read, add_special_tokens=False).input_ids:
        raise SpecError("TEXT", str(text), "must hold a token of the model, and holds none")
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
