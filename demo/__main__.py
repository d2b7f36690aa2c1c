"""`python -m demo`."""

import sys

from demo.train_gpt import main

sys.exit(main())
