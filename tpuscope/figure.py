"""A matplotlib figure that a notebook shows by itself."""

import io

from matplotlib.figure import Figure


class Picture(Figure):
    """A figure that a notebook shows, whether pyplot is in use or not."""

    def _repr_png_(self) -> bytes:
        content = io.BytesIO()
        self.savefig(content, format="png")
        return content.getvalue()
