"""Pages that commands write: templates of this folder, filled in by Jinja2 (the extra `html`)."""

from pathlib import Path


def render(template: str, **values) -> str:
    """The page of a template. Raises RuntimeError where Jinja2 is missing."""
    try:
        import jinja2
    except ImportError:
        raise RuntimeError(
            "a page needs Jinja2, which is not installed: pip install 'plait[html]'"
        ) from None
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(Path(__file__).parent),
        autoescape=True,
        trim_blocks=True,
        lstrip_blocks=True,
        undefined=jinja2.StrictUndefined,
    )
    return environment.get_template(template).render(values)
