"""Sphinx settings of the reading edition; tools/build_site.py prepares the sources."""

from ipython_pygments_lexers import IPython3Lexer

project = html_title = "MSHNet on TPU"
language = "en"
exclude_patterns = ["download"]  # notebooks as they are, for the download links
html_show_copyright = False

# githubpages writes .nojekyll: without it GitHub Pages leaves out folders such as _static.
extensions = ["myst_nb", "sphinx_copybutton", "sphinx.ext.githubpages"]

# Lessons show the outputs of the last `make notebooks`. The site computes nothing.
nb_execution_mode = "off"
nb_ipywidgets_js = {}  # no widgets, so no scripts from other servers

myst_enable_extensions = ["attrs_block", "attrs_inline", "html_image"]
myst_heading_anchors = 4  # #names-of-headings as on GitHub
smartquotes = False  # would turn the two hyphens of --flags into a dash

highlight_language = "none"  # a fence without a language is a command or a drawing, not Python

html_theme = "furo"
pygments_dark_style = "github-dark"  # furo's own underlines imported names, as if they were links
html_static_path = ["_static"]
html_css_files = ["site.css"]
html_js_files = ["site.js"]
html_favicon = "_static/icon.svg"
html_use_index = False  # there is no API here to index; the search has the words
html_copy_source = False  # the staged copies are nobody's source
html_theme_options = {
    "light_css_variables": {"color-brand-primary": "#0a63c9", "color-brand-content": "#0a63c9"},
    "dark_css_variables": {
        "color-brand-primary": "#6cb2ff",
        "color-brand-content": "#6cb2ff",
        "color-code-background": "#1c1f23",  # lighter than the page, as code is darker by day
    },
}

# Code and commands are there to be copied, outputs are not.
copybutton_selector = "div.highlight:not(.cell_output div.highlight) > pre"
copybutton_exclude = ".linenos, .gp, .go"


def _page_language(app, pagename, templatename, context, doctree):
    """Fonts for Chinese and Korean are chosen by the page's language: GUIDE.zh, GUIDE.ko."""
    code = pagename.rpartition(".")[2]
    if code in ("zh", "ko"):
        context["language"] = code


def setup(app):
    app.add_lexer("python", IPython3Lexer)  # examples for Colab have lines such as `!mshnet train`
    app.connect("html-page-context", _page_language)
