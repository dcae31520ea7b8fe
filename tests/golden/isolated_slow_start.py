"""What a worker of `test_isolate` imports, and never comes to the end of."""

import time

time.sleep(600)
