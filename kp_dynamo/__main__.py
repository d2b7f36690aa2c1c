"""`python -m kp_dynamo`."""

import sys

from kp_dynamo.cli.main import main

sys.exit(main())
