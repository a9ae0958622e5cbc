"""`python -m conformance.assurance.vector_writer`."""

import sys

from conformance.assurance.vector_writer.store import main

sys.exit(main())
