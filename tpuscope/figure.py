"""A matplotlib figure that a notebook displays without pyplot."""

import io

from matplotlib.figure import Figure


class Picture(Figure):
    """A figure that a notebook displays, with or without pyplot."""

    def _repr_png_(self) -> bytes:
        content = io.BytesIO()
        self.savefig(content, format="png")
        return content.getvalue()
