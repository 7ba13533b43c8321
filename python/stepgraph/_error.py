"""The exception that the library's own refusals become."""


class Error(RuntimeError):
    """A refusal or a failure of the library: one sentence that names the operand, what it was and what it must be.

    ``code`` says of which kind: ``"invalid_geometry"``, ``"invalid_buffer"``, ``"workspace_too_small"``, ``"wrong_order"``,
    ``"invalid_rows"``, ``"invalid_layer"``, ``"invalid_capture"``, ``"cuda"`` or ``"cublas"``. Arguments of a wrong type raise
    TypeError, tensors of a wrong shape, stride or device ValueError.
    """

    def __init__(self, code: str, sentence: str) -> None:
        super().__init__(code, sentence)
        self.code = code

    def __str__(self) -> str:
        return str(self.args[1])
