"""P2PScheduler: the shell around the scheduler-role connector's machines.

Two threads meet here. vLLM's scheduler thread feeds events, drains what is its own to do (pins, names, reads, reports)
and may wait for that; the control thread of the side channel brings messages and fires timers. The machines decide, the
driver makes the threads take turns, and this class only sends each action where it belongs:

    SendToReader, SendToProducer, ClosePeer    to the side channel
    Count                                      to the statistics
    all others                                 to the inbox of the scheduler thread, in order, waking it

An engine that only consumes listens nowhere; one that only produces connects to nobody.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

from vllm_mooncake_ascend import limits
from vllm_mooncake_ascend.config import P2PConfig
from vllm_mooncake_ascend.errors import LocalProtocolError
from vllm_mooncake_ascend.layout.plane import RankLayout
from vllm_mooncake_ascend.metrics import names
from vllm_mooncake_ascend.metrics.stats import Stats
from vllm_mooncake_ascend.p2p import actions, events
from vllm_mooncake_ascend.p2p.consumer import Consumer
from vllm_mooncake_ascend.p2p.producer import Producer
from vllm_mooncake_ascend.p2p.settings import ConsumerSettings, ProducerSettings
from vllm_mooncake_ascend.runtime.address_policy import address_policy
from vllm_mooncake_ascend.runtime.clock import boot_s
from vllm_mooncake_ascend.runtime.curve import curve_keys
from vllm_mooncake_ascend.runtime.driver import Action, Driver
from vllm_mooncake_ascend.runtime.inbox import Inbox
from vllm_mooncake_ascend.runtime.listener import Listening
from vllm_mooncake_ascend.runtime.side_channel import SideChannel
from vllm_mooncake_ascend.types import Incarnation, PeerAddress, RequestId
from vllm_mooncake_ascend.wire import params
from vllm_mooncake_ascend.wire.messages import FromProducer, FromReader


class P2PScheduler:
    """One per engine (DP rank). `start` once, `close` once; all else from the scheduler thread in between.

    The methods of `side_channel.Owner` at the end are for the control thread.
    """

    def __init__(
        self,
        *,
        config: P2PConfig,
        incarnation: Incarnation,
        produces: bool,
        consumes: bool,
        wake: Callable[[], None] = lambda: None,
    ) -> None:
        """`wake` is called, from any thread, when `drain` has something new, or `remote_tokens` may have."""
        self.incarnation = incarnation
        self._config = config
        self._produces = produces
        self._consumes = consumes
        self._driver = Driver(self._carry_out, is_strict=config.is_strict)
        self._inbox: Inbox[Action] = Inbox(capacity=limits.MAX_INBOX, wake=wake)
        self._stats = Stats()
        self._has_news = False
        """Something happened since the statistics were taken."""
        self._producer: Producer | None = None
        self._consumer: Consumer | None = None
        self._channel: SideChannel | None = None
        self._failure: BaseException | None = None

    # --- life -----------------------------------------------------------------------------------------------------

    def start(
        self,
        ranks: tuple[RankLayout, ...],
        fingerprint: dict[str, str],
        *,
        num_blocks: int,
        can_report_unknown_at_once: bool,
        publishes: bool = False,
        reads_early: bool = False,
    ) -> None:
        """Open the side channel.

        Args:
            ranks: layouts of all workers.
            fingerprint: what peers must agree on.
            num_blocks: of the block pool, of which `max_pinned_ratio` may be pinned.
            can_report_unknown_at_once: see `ConsumerSettings`.
            publishes: progress of prefills is told, and may be offered.
            reads_early: blocks of prefills that still run may be read.

        Raises:
            ConfigError: the address cannot be listened on, or a secret is set and ZMQ cannot encrypt.
        """
        assert self._channel is None, "started twice"
        config = self._config
        if self._produces:
            producer_settings = ProducerSettings(
                lease_ttl_s=config.lease_ttl_s,
                lease_max_s=config.lease_max_s,
                max_pinned_blocks=int(num_blocks * config.max_pinned_ratio),
                streams=publishes,
            )
            self._producer = Producer(self.incarnation, fingerprint, ranks, producer_settings)
            self._driver.add_producer(self._producer)
        if self._consumes:
            consumer_settings = ConsumerSettings(
                num_ranks=len(ranks),
                fail_on_load_error=config.load_failure_policy == "fail",
                can_report_unknown_at_once=can_report_unknown_at_once,
                min_remote_tokens=config.min_remote_tokens,
                offer_wait_s=config.offer_wait_s,
                read_wait_s=config.read_wait_s,
                lease_ttl_s=config.lease_ttl_s,
                streams=reads_early,
            )
            self._consumer = Consumer(self.incarnation, fingerprint, ranks, consumer_settings)
            self._driver.add_consumer(self._consumer)
        listening = Listening(host=config.side_channel_host, port=config.side_channel_port)
        self._channel = SideChannel(
            self,
            self.incarnation,
            listening=listening if self._produces else None,
            policy=address_policy(config.peers, has_secret=config.secret is not None),
            keys=curve_keys(config.secret),
        )
        self._channel.start()

    def close(self) -> None:
        """Say Goodbye to readers, end the control thread, close all sockets. A second call does nothing."""
        if self._channel is not None:
            self._channel.close()

    # --- for the scheduler thread ---------------------------------------------------------------------------------

    @property
    def address(self) -> PeerAddress | None:
        """Where decode engines reach this one; None on an engine that does not produce."""
        return self._started.address

    def check_peer_allowed(self, address: PeerAddress) -> None:
        """Accept a producer's address by returning.

        Raises:
            RemoteProtocolError: no secret is set and it is neither this host nor listed in `peers`.
        """
        self._started.policy.check(params.split_address(address)[0])

    def feed_producer(self, event: events.ProducerEvent) -> None:
        """Ignored on an engine that does not produce."""
        with self._waking_control_thread():
            self._driver.feed_producer(event)

    def feed_consumer(self, event: events.ConsumerEvent) -> None:
        """Ignored on an engine that does not consume."""
        with self._waking_control_thread():
            self._driver.feed_consumer(event)

    def remote_tokens(self, request_id: RequestId, num_local_tokens: int) -> int | None:
        """Tokens that remote KV brings beyond `num_local_tokens`; None: not known yet, ask again."""
        if self._consumer is None or self._driver.is_broken(request_id):
            return 0
        with self._driver.lock:
            return self._consumer.remote_tokens(request_id, num_local_tokens)

    def waits_for_peers(self) -> bool:
        """Some request waits for or reads remote KV."""
        return self._consumer is not None and self._consumer.num_loads > 0

    def awaits_ranks(self) -> bool:
        """Some read has all it needs, and has not ended."""
        if self._consumer is None:
            return False
        with self._driver.lock:
            return self._consumer.awaits_ranks

    def drain(self) -> list[Action]:
        """What the machines want done by the scheduler thread, in order.

        Raises:
            LocalProtocolError: the control thread has failed; this engine cannot transfer KV any more.
        """
        if self._failure is not None:
            raise LocalProtocolError("the side channel of this engine has failed, see the log") from self._failure
        return self._inbox.drain()

    def wait(self, timeout_s: float) -> bool:
        """Whether `drain` has something: now, or within `timeout_s`."""
        return self._inbox.wait(timeout_s)

    def story(self, transfer_id: str) -> str:
        """The last things that happened to a transfer."""
        return self._driver.story(transfer_id)

    def gauges(self) -> dict[str, int]:
        """What is held at this moment, by metric name."""
        producer, consumer = self._producer, self._consumer
        with self._driver.lock:
            return {
                names.LEASES_OPEN: 0 if producer is None else producer.num_leases,
                names.BLOCKS_PINNED: 0 if producer is None else producer.num_pinned_blocks,
                names.LOADS_IN_FLIGHT: 0 if consumer is None else consumer.num_loads,
                names.BLOCKS_QUARANTINED: 0 if consumer is None else consumer.num_quarantined_blocks,
            }

    def take_stats(self) -> dict[str, Any]:
        """What happened since the last call, as `metrics.stats` has it; empty when nothing did."""
        if not self._has_news:
            return {}
        with self._driver.lock:
            self._has_news = False
            for name, value in self.gauges().items():
                self._stats.set_gauge(name, value)
            return self._stats.take()

    # --- side_channel.Owner, for the control thread ---------------------------------------------------------------

    def reader_spoke(self, peer: bytes, message: FromReader) -> None:
        self._driver.feed_producer(events.ReaderSpoke(peer=peer, message=message))

    def producer_spoke(self, peer: PeerAddress, message: FromProducer) -> None:
        self._driver.feed_consumer(events.ProducerSpoke(peer=peer, message=message))
        self._inbox.nudge()

    def peer_disconnected(self, peer: PeerAddress, reason: str) -> None:
        self._driver.feed_consumer(events.PeerDisconnected(peer=peer, reason=reason))
        self._inbox.nudge()

    def fire_timers(self) -> float | None:
        due_s = self._driver.next_timer_s()
        next_s = self._driver.fire_timers()
        if due_s is not None and due_s <= boot_s():
            self._inbox.nudge()
        return next_s

    def is_crowded(self) -> bool:
        return self._inbox.is_crowded

    def count(self, name: str, label: str = "") -> None:
        """Add one to a counter; from any thread."""
        with self._driver.lock:
            self._stats.count(name, label)
            self._has_news = True

    def channel_failed(self, error: BaseException) -> None:
        self._failure = error

    # --- inside ---------------------------------------------------------------------------------------------------

    @property
    def _started(self) -> SideChannel:
        assert self._channel is not None, "not started"
        return self._channel

    @contextlib.contextmanager
    def _waking_control_thread(self) -> Iterator[None]:
        """The control thread sleeps until the earliest timer it knows: tell it when an event brought an earlier one."""
        with self._driver.lock:  # else the control thread could take the earlier timer for done and sleep past the new one
            before_s = self._driver.next_timer_s()
            yield
            after_s = self._driver.next_timer_s()
        if after_s is not None and (before_s is None or after_s < before_s):
            self._started.wake()

    def _carry_out(self, action: Action) -> None:
        self._has_news = True
        match action:
            case actions.SendToReader() | actions.SendToProducer() | actions.ClosePeer():
                self._started.submit(action)
            case actions.Count():
                self._stats.count(action.name, action.reason, action.amount)
            case _:
                if not self._inbox.put(action):
                    raise LocalProtocolError(
                        f"{limits.MAX_INBOX} actions wait for vLLM's scheduler thread, which does not take them"
                    )
