"""What a worker of `test_pool` imports, and never comes to the end of."""

import time

time.sleep(600)
