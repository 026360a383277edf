"""``python -m nvfp4_linear``: see cli.py."""

import sys

from .cli import main

sys.exit(main())
