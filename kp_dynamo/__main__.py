"""`python -m kp_dynamo`."""

import sys

from kp_dynamo.cli import main

sys.exit(main())
