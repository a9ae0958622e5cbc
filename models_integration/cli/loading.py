"""The model of a command, as its options say it."""

from dataclasses import dataclass

from models_integration.studies.subject import AUTO, Subject, check_loading, load_subject

__all__ = ["Loading"]


@dataclass(frozen=True)
class Loading:
    """Which model, and how it is loaded."""

    model: str = "pocket"
    backend: str = AUTO
    device: str = "cpu"
    dtype: str = AUTO
    attn: str = AUTO

    def check(self) -> None:
        """Refuse what can be refused before the model is read.

        Raises:
            SpecError: as `check_loading`.
            BackendUnavailable: as `check_loading`.
        """
        check_loading(self.backend, self.device, self.dtype, self.attn)

    def subject(self) -> Subject:
        """Load it.

        Raises:
            SpecError: as `load_subject`.
            BackendUnavailable: as `load_subject`.
        """
        return load_subject(self.model, self.backend, self.device, self.dtype, self.attn)
