"""`python -m dynatrain_megatron.cli` is the same as `dynatrain`."""

import sys

from dynatrain_megatron.cli import main

sys.exit(main())
