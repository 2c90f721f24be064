"""Any transport, with caps on what it sends and receives, and votes ahead of frames.

A cap holds over all streams together. Sending waits before bytes go; receiving reads slower, so the other side waits:
what the network's buffers hold then (the daemon: about 1 MiB a stream) is the only overshoot. Bytes of protocols that
are not named urgent are bulk. Nothing else crosses the wire than without caps.

Time that our own cap takes is nobody's stall: our watchdogs stand still meanwhile. The other side's do not, so only as
many pushes begin at once as leave each of them eight times the least rate.
"""

from decentral.transport.throttle.caps import LEAST_CAP, Caps
from decentral.transport.throttle.gate import Gate
from decentral.transport.throttle.stream import ThrottledStream
from decentral.transport.throttle.transport import ThrottledTransport

__all__ = ["LEAST_CAP", "Caps", "Gate", "ThrottledStream", "ThrottledTransport"]
