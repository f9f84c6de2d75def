"""What a browser draws of a page that a command wrote."""

import importlib.util
import os
import shutil
import subprocess

import numpy as np
import pytest

BROWSERS = ("chromium", "chromium-browser", "google-chrome", "chrome", "chromium-headless-shell")


def picture(page, folder, height):
    """The page as an array [height, 1400, 3] of bytes."""
    browser = next(filter(None, map(shutil.which, BROWSERS)), None)
    missing = []
    if browser is None:
        missing.append(f"no browser: none of {', '.join(BROWSERS)} is on the PATH")
    if importlib.util.find_spec("PIL") is None:
        missing.append("no Pillow to read its picture")
    if missing:
        missing = "; ".join(missing)
        pytest.fail(missing) if os.environ.get("PLAIT_TEST_STRICT") == "1" else pytest.skip(missing)
    from PIL import Image

    (folder / "page.html").write_text(page, encoding="utf-8")
    subprocess.run([browser, "--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars",
                    "--disable-dev-shm-usage", "--force-device-scale-factor=1", f"--user-data-dir={folder}/profile",
                    f"--window-size=1400,{height}", f"--screenshot={folder}/page.png",
                    (folder / "page.html").as_uri()],
                   check=True, capture_output=True, timeout=120)
    return np.array(Image.open(folder / "page.png").convert("RGB"))


def rgb(colour):
    return [int(colour[i : i + 2], 16) for i in (1, 3, 5)]
