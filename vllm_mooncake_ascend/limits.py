"""Every bound of the product: name with unit, value, and the reason for the value.

Whoever needs a bound takes it from here; relations that must hold between bounds are asserted at the end, so that a
change that breaks one fails at import.
"""

from __future__ import annotations

# --- Send leases (P2P) -------------------------------------------------------------------------------------------------
LEASE_TTL_S = 30.0
"""A producer keeps unread blocks this long after the last renewal it acknowledged. A decode engine that died frees them
within this time; a queueing one renews and loses nothing."""
LEASE_TTL_MIN_S = 1.0
LEASE_MAX_S = 300.0
"""No lease outlives the end of its prefill by more than this, whoever renews it."""
LEASE_CEILING_S = 3_600.0
"""The longest lease time that may be configured: blocks of a vanished reader are never held longer than an hour."""
LEASE_MARGIN_S = 2.0
"""The time rule trusts a lease only up to ttl minus this: it covers timer slack, not clock skew (one clock is used)."""
RENEWALS_PER_TTL = 5
"""Renewals sent within one ttl, so that four in a row may be lost."""
MAX_TRANSFERS = 65_536
"""Transfers a producer remembers at once, verdicts of ended ones included; the oldest ended ones are forgotten first."""
VERDICT_MEMORY_S = 120.0
"""How long a producer answers for an ended transfer; longer than any reader may still be asking."""
MAX_READERS_PER_TRANSFER = 64
"""Readers (decode incarnation, request) of one transfer: n>1 children and retries, never a fleet."""
UNKNOWN_TRANSFER_WAIT_S = 30.0
"""Decode may ask for a transfer before its prefill request is admitted (both legs are sent at once). An engine admits
between steps, and one step of a long prefill on CPU lasts seconds; what is not announced by then does not exist."""
MAX_AWAITED_TRANSFERS = 8_192
"""Transfers somebody asked for, or released, that no prefill has announced."""
MAX_AWAITED_PER_READER = 1_024
"""Of these, as many may be of one reader engine, so that none can use up the room of all."""
MAX_PINNED_RATIO = 0.9
"""Share of an engine's KV blocks that leases may hold; above it the oldest unread leases are revoked."""

# --- The decode side ----------------------------------------------------------------------------------------------------
PEER_ANSWER_S = 5.0
"""A peer that leaves a message unanswered this long is taken for lost. A side channel beside a spinning engine loop
answers within 0.3 s at the worst measured, so this is silence, not slowness."""
RESEND_S = 0.5
"""Unanswered messages are sent again after this; every message is idempotent."""
SENDS_BEFORE_LOST = 3
"""A silent peer is lost only after messages were sent to it at so many moments: a process that was itself stopped for a while
finds all its waits over, and the answers still unread."""
MAX_UNANSWERED = 16_384
"""Messages to one peer that are repeated until answered; beyond it a farewell is sent once."""
OFFER_WAIT_S = 120.0
"""How long decode waits for a prefill that has not ended yet, while the peer keeps answering."""
READ_WAIT_S = 60.0
"""Upper bound on the reads of one request; when it passes, no further engine call of it is started."""
MAX_WAITING_REQUESTS = 8_192
"""Requests of one decode engine that may wait for remote KV; the rest computes locally."""
MIN_REMOTE_TOKENS = 1
"""Fewer remote tokens than this are cheaper to compute than to fetch."""
MAX_PEERS = 1_024
"""Producers a decode engine keeps a handshake with; the longest unused one is forgotten first."""
PEER_IDLE_S = 300.0
"""A producer nobody has read from for this long is forgotten, and the socket to it closed."""
ENGINE_RESTART_MIN_S = 5.0
"""No other engine serves on the ports of one that died sooner than this: importing torch and vLLM alone takes 8 s. The
time rule needs it: a read that ended within this after a sign of life cannot have met a successor's memory."""
RANK_ANSWER_S = 30.0
"""How much later than its own bounds a worker's read may be reported to the scheduler: results travel with the output of
an engine step, and a step may last seconds."""
MAX_REMEMBERED_READS = 1_024
"""Reads a worker remembers that have ended, or were cancelled before it knew them; the oldest are forgotten first."""
QUARANTINE_S = 90.0
"""How long blocks of an UNKNOWN read stay out of circulation where the engine offers no fence (RDMA, Ascend). Ascend gives
up after two attempts of connect and transfer timeout (2 x (10 + 10) s by default) and was seen, on the emulator, to need
60 s more until nothing moves. Over TCP the reading engine is destroyed instead, which is certain and takes milliseconds."""

# --- Engine calls -------------------------------------------------------------------------------------------------------
MAX_CALL_BYTES = 64 << 20
"""Bytes of one engine call. Small enough that requests share the wire call by call and that the timeout of one call is
short; large enough that the fixed cost of a call (below 1 ms) does not show."""
MAX_CALL_DESCRIPTORS = 1_024
"""Descriptors of one engine call: Mooncake's TCP transport queues 1,024 to a peer before it starts to refuse."""
ENGINE_CALL_S = 10.0
"""MC_TRANSFER_TIMEOUT we set (seconds, Mooncake's minimum is 5): the longest an engine call blocks on a silent peer."""
MIN_SLEPT_READ_BYTES = 4 << 20
"""Engine calls over TCP for fewer bytes wait busily: they end within 2 ms, sleep takes small ones a tenth of their rate."""
READ_POLL_S = 0.0002
"""Between two looks at a read that is slept for; each costs some microseconds. 0.1 to 0.5 ms were equal within the noise."""
TCP_QUEUED_TRANSFERS = 65_535
"""MC_TCP_MAX_QUEUED_TRANSFERS_PER_PEER we set: a full queue can wedge a peer for ever (Mooncake 0.3.13.post1)."""
MAX_DESCRIPTORS_PER_REQUEST = 262_144
"""Descriptor budget of one request and rank: at 16-20 us a descriptor over TCP this is 5 s. Above it the planner copies
whole parts and permutes on the device."""
MAX_MERGED_DESCRIPTOR_BYTES = 4 << 20
"""Neighbouring runs are merged up to this: throughput is flat from 96 KiB a descriptor on."""
MAX_REGIONS = 256
"""Registered memory regions of one engine (Ascend's limit)."""

# --- Messages ------------------------------------------------------------------------------------------------------------
MAX_MESSAGE_BYTES = 16 << 20
"""A side-channel message: a layout of 256 layers or the block table of a million-token prompt is far below."""
MAX_ID_CHARS = 512
"""Request and transfer ids, host names: longer ones are not ids."""
MAX_GROUPS = 64
MAX_BLOCKS_PER_TRANSFER = 1 << 20
MAX_RANKS = 1_024
"""Workers of one engine (TP times PP) in a handshake."""
MAX_PLANES = 4_096
"""Planes of one rank: a thousand layers of four parts."""
MAX_DIGEST_BYTES = 64
MAX_FINGERPRINT_ENTRIES = 256
MAX_FINGERPRINT_CHARS = 4_096
MAX_DIFFERENCES = 32
"""Differences named when two engines do not fit: enough to repair a configuration, short enough for one log line each."""
MAX_INBOX = 65_536
"""Messages between threads; overflow is a counted refusal, never growth."""
PARAMS_MAX_AGE_S = 600.0
"""Signed kv_transfer_params older than this are not accepted."""

# --- Prefix pool -------------------------------------------------------------------------------------------------------
OBJECT_LEASE_S = 30.0
"""`default_kv_lease_ttl` of the master we start: what a lookup or get has found is neither evicted nor removed this long.
Mooncake's own default of 10 s was seen to pass under CPU pressure."""
SEGMENT_BYTES = 1 << 30
"""Memory each worker lends to the pool unless told otherwise: what vllm-ascend lends. vLLM lends 4 GiB, which four workers on
one small machine do not have."""
SEGMENT_MIN_BYTES = 16 << 20
"""Mooncake's allocator takes no less (`client_buffer_allocation.cpp`, 0.3.13.post1)."""
SEGMENT_MAX_BYTES = 16 << 40
"""More is a slip of the unit."""
MAX_REPLICAS = 16
"""Copies of one object that may be asked for."""
LOOKUP_WAIT_S = 0.005
"""How long a request may be held back for its lookup; then it counts as a miss."""
LOOKUP_WAIT_CPU_S = 0.2
"""The same on CPU, where engines share cores with whatever else runs, and one block takes longer than this to compute: on a
busy host with two cores answers came after 9 to 22 ms."""
LOOKUP_WAIT_PER_BLOCK_S = 10e-6
"""Added to that for each block that is asked for: in a busy process 1,000 take 6 ms from arrival to answer, and the longer a
prompt, the more there is to gain. 128k tokens at 128 a block may so wait 15 ms."""
LOOKUP_OVERDUE_S = 1.0
"""A lookup without an answer for this long is the sign of a dead master, whose calls take 4 to 30 s to say so."""
MAX_LOOKUPS_AT_ONCE = 2
"""Lookups under way: so that one slow call does not turn all others into misses. Each takes a thread."""
MAX_QUEUED_LOOKUPS = 1_024
"""Lookups that wait for their turn; a request beyond that is not looked up."""
MAX_LOOKUPS_PER_REQUEST = 4
"""A request that waits long for admission is looked up anew; each time vLLM may wait LOOKUP_WAIT_S for it."""
MIN_HIT_TOKENS = 1
"""Fewer tokens than this are cheaper to compute than to load."""
LOAD_WAIT_S = 10.0
"""A load that takes longer is given up, and the request computes: a get from a stopped owner hangs for 60 s."""
MAX_LOADS = 1_024
"""Loads of one engine that vLLM may wait for; further requests compute."""
MAX_GETS_AT_ONCE = 2
"""Gets of one worker under way, each of another load: one that hangs must not hold up all. Each takes a thread."""
MAX_SEALED_CALLS = MAX_GETS_AT_ONCE + 2
"""Puts and gets of one client under way with seals of their own; a worker puts one at a time, and one is to spare."""
STORE_CALL_S = 61.0
"""The longest a store call blocks on an owner that it has spoken with before: 60 s, hard-coded in Mooncake 0.3.13. The first
word to an owner that is stopped takes as long for each key of the call, one after the other."""
FENCE_RETRY_MIN_S = 0.05
"""A fence of the store that did not hold is tried again after this, doubled each time up to the next bound. After an UNKNOWN
get there is no time after which its bytes cannot land: 235 of 256 buffers did when the owner went on, 100 s after the get had
failed. So no waiting takes the fence's place."""
FENCE_RETRY_MAX_S = 5.0
LOAD_END_S = 2 * STORE_CALL_S + RANK_ANSWER_S
"""A load that was given up and has not ended at some rank after this is told to the operator, and keeps its blocks: its call
under way, another one that the fence had to wait for, the fence, and the way back."""
SAVE_WAIT_S = 30.0
"""A save that did not get its turn within this is dropped: its blocks are wanted back."""
MAX_QUEUED_SAVE_BLOCKS = 4_096
"""Blocks of saves that wait behind another in a worker; the oldest are dropped first. Half a million tokens of 128 a block."""
MAX_SAVED_RATIO = 0.25
"""Share of an engine's KV blocks that saves may hold; beyond it nothing is saved until some have ended."""
FULL_RETRY_S = 0.05
"""A full store evicts in the background within 10 to 50 ms, so a put is tried once more after this."""
FULL_PAUSE_MIN_S = 1.0
"""Saves are dropped for this long when the store stays full, doubled each time up to the next bound."""
FULL_PAUSE_MAX_S = 30.0
KNOWN_STORED_S = 300.0
"""How long an engine believes that what it put, or got, is still in the pool, and does not save it again."""
MAX_KNOWN_STORED = 262_144
"""Block hashes it believes that of, in each of two ages; 32 bytes each and the table."""
MAX_KV_EVENTS = 65_536
"""KV events that wait for vLLM, which takes them with every step; beyond it the oldest are lost."""
MAX_HASHES_PER_EVENT = 1_024
"""Blocks that one KV event removes: after a reset there may be as many as MAX_KNOWN_STORED."""
STORE_PROBE_S = 1.0
"""While the breaker is open the store's health is looked at this often; it costs no call, and is up to 2 s old."""
PROBES_TO_CLOSE = 2
"""Healthy answers in a row that close the breaker, because the first may be old."""
PROBES_TO_MOVE = 5
"""Probes in a row that find the master gone and its name standing for other machines, before its clients are closed and made
anew. Mooncake follows by itself within 3 s when the old master refuses connections."""
BREAKER_NOTE_S = 30.0
"""At most one line for the operator in this time, however often the store comes and goes."""
STORE_RPC_MS = 2_000
"""MC_RPC_TIMEOUT_MS we set: how long a call waits for a master that is stopped. Lookups of 10,000 keys take 13 ms."""
STORE_CONNECT_S = 0.5
"""A master's port that does not accept within this is taken for dead: the client's own attempt would hold the GIL for 5 s."""
MAX_LOOKUP_KEYS = 16_384
"""Keys of one lookup: 1.3 us each, so 20 ms; a prompt of two million tokens at 128 a block."""
MASTER_CLIENT_TTL_S = 60.0
"""`client_ttl` of the master we start: an owner silent for this long is forgotten with all it holds. Mooncake's own 10 s
was seen to throw out live owners under CPU pressure."""

# --- The waiting engine --------------------------------------------------------------------------------------------------
EMPTY_STEP_WAIT_S = 0.005
"""Longest sleep in a step that has nothing to run. Neither vLLM's input queue nor a new request can end it, so it is
also what a new request may be late by; 5 ms was not measurable in its TTFT."""

# --- Proxy -----------------------------------------------------------------------------------------------------------------
UPSTREAM_KEEPALIVE_S = 2.0
"""Pooled upstream connections are dropped well before uvicorn closes them (5 s)."""
MAX_BODY_BYTES = 64 << 20
"""A client's request and an instance's unstreamed answer: a million token ids as JSON are 8 MB."""
MAX_EVENT_BYTES = 16 << 20
"""One server-sent event of an answer; a final chunk with log probabilities is the largest seen."""
MAX_CLIENT_REQUESTS = 8_192
"""Requests one proxy serves at once; more are refused with 503. Each holds up to three sockets, so a system may allow fewer."""
MAX_RELEASES = 65_536
"""Releases under way at once; beyond it the send lease's own time frees the blocks."""
LEG_ATTEMPTS = 2
"""Instances asked for one leg of a client's request: the first and, before any byte went to the client, one more."""
UPSTREAM_CONNECT_S = 10.0
"""Longest wait for a connection to an instance. On one network it takes milliseconds, or never comes; but a proxy that
thousands of clients hit at once may need seconds to see that it is there."""
CONNECTS_AT_ONCE = 128
"""Connections to one instance that may be in the making; more would only be noticed later."""
UPSTREAM_SILENCE_S = 600.0
"""Default for how long an instance may send nothing: queueing and a long prefill on CPU are minutes, not more."""
CLIENT_BODY_S = 60.0
"""A client has this long to send its request."""
COOL_DOWN_S = 5.0
"""An instance found broken gets no request for this long; a vLLM start takes longer, a blip is over sooner."""
FAILURES_TO_COOL_DOWN = 3
"""Answers of 500 and up, or unanswered probes, in a row before an instance that still connects counts as broken."""
PROBE_INTERVAL_S = 2.0
PROBE_ANSWER_S = 1.5
"""A probe without an answer for this long counts against its instance."""
DRAIN_S = 30.0
"""Default for how long running requests may go on after the proxy was told to stop."""

assert LEASE_TTL_MIN_S < LEASE_TTL_S < LEASE_MAX_S
assert LEASE_TTL_S / RENEWALS_PER_TTL + 2 * RESEND_S < LEASE_TTL_S - LEASE_MARGIN_S, "a lost renewal must not cost a lease"
assert RESEND_S * 2 < PEER_ANSWER_S, "a lost message must not look like a lost peer"
assert VERDICT_MEMORY_S > READ_WAIT_S + ENGINE_CALL_S + PEER_ANSWER_S, "a late reader must still get its verdict"
assert UNKNOWN_TRANSFER_WAIT_S < OFFER_WAIT_S, "prefill must say `unknown` before decode gives up"
assert ENGINE_RESTART_MIN_S < LEASE_TTL_S
assert max(2 * 20.0, 30.0 + ENGINE_CALL_S) < QUARANTINE_S, "nothing may land after the quarantine"
assert MAX_MERGED_DESCRIPTOR_BYTES <= MAX_CALL_BYTES
assert EMPTY_STEP_WAIT_S <= 0.005
assert PROBE_INTERVAL_S + PROBE_ANSWER_S < COOL_DOWN_S, "a probe must find an instance broken before it is trusted again"
assert LOAD_WAIT_S < OBJECT_LEASE_S / 2, "what a lookup found must outlive the load"
assert LOOKUP_WAIT_S <= LOOKUP_WAIT_CPU_S < LOOKUP_OVERDUE_S
assert PROBES_TO_MOVE * STORE_PROBE_S > 3, "Mooncake must have had its chance to follow the master"
assert SEGMENT_MIN_BYTES <= SEGMENT_BYTES <= SEGMENT_MAX_BYTES
assert FENCE_RETRY_MIN_S <= FENCE_RETRY_MAX_S < RANK_ANSWER_S
assert FULL_RETRY_S < FULL_PAUSE_MIN_S <= FULL_PAUSE_MAX_S
