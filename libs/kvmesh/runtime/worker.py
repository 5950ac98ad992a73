"""A worker: one engine, its blocks, a prefill and a decode side, and its connections to the mesh.

Prefill and decode workers are the same program with another default role (FlowKV 3.4).
Tests: tests/integration/test_worker.py.
"""

from __future__ import annotations

import asyncio
import dataclasses
import os
import time
from functools import partial

from kvmesh.core.block_names import DISK, HOST
from kvmesh.core.clock import SystemClock
from kvmesh.core.details import WorkerDetail
from kvmesh.core.errors import ConfigError
from kvmesh.core.silence import read_threads
from kvmesh.core.starved_time import StarvedTime
from kvmesh.core.types import Endpoint, RequestId, Role, WorkerId, WorkerInfo, WorkerLoad
from kvmesh.engine.copier import ThreadCopier
from kvmesh.engine.core import EngineCore
from kvmesh.engine.loop import EngineLoop
from kvmesh.engine.protocol import ModelRunner
from kvmesh.engine.shared_cores import SharedCores
from kvmesh.engine.structure import StructureCompiler
from kvmesh.policy.batching import BatchLimits
from kvmesh.policy.prompt_time import PromptTime
from kvmesh.rpc.publisher import BlockPublisher, PublisherFacts
from kvmesh.rpc.registration import OperatorHooks, PeerHooks, SchedulerRegistration
from kvmesh.runtime.app import ServiceContext
from kvmesh.runtime.chain_metrics import ChainMetrics
from kvmesh.runtime.decode_role import DecodeRole
from kvmesh.runtime.device_watch import with_device_errors
from kvmesh.runtime.kv_events import start_kv_events
from kvmesh.runtime.native_code import native_levels
from kvmesh.runtime.peer_connector import PeerConnector
from kvmesh.runtime.pool_copies import PoolCopies
from kvmesh.runtime.pool_metrics import PoolMetrics
from kvmesh.runtime.prefill_role import PrefillRole, PrefixWays
from kvmesh.runtime.prefix_fetch import PrefixFetcher
from kvmesh.runtime.prefix_sources import PrefixSources
from kvmesh.runtime.prompt_chain import PromptChain
from kvmesh.runtime.query_metrics import QueryMetrics
from kvmesh.runtime.step_meter import StepMeter
from kvmesh.runtime.tier_metrics import TierCollector
from kvmesh.runtime.worker_adapters import WorkerAdapters, started_adapters
from kvmesh.runtime.worker_channels import MEGABYTE, receive_options, send_options, transfer_mode
from kvmesh.runtime.worker_config import WorkerConfig, parse_role
from kvmesh.runtime.worker_detail import worker_detail
from kvmesh.runtime.worker_loading import Loading
from kvmesh.runtime.worker_metrics import WorkerMetrics
from kvmesh.runtime.worker_parts import WorkerIdentity, WorkerParts
from kvmesh.runtime.worker_pool import make_pool, start_fetcher
from kvmesh.runtime.worker_queries import answer_queries, start_queries
from kvmesh.runtime.worker_swap import make_swap_space
from kvmesh.runtime.worker_tiers import TierParts, make_outside, make_tiers, start_tiers
from kvmesh.telemetry.logs import event_logger
from kvmesh.transfer.channel_pool import ChannelPool
from kvmesh.transfer.data_server import DataServer
from kvmesh.transfer.protocol import ChannelIdentity
from kvmesh.v1 import decode_service_pb2_grpc, kv_pool_service_pb2_grpc, prefill_service_pb2_grpc

log = event_logger(__name__)


class Worker:
    """Builds and connects all parts of a worker."""

    def __init__(
        self,
        config: WorkerConfig,
        context: ServiceContext,
        runner: ModelRunner,
        metrics: WorkerMetrics,
        structures: StructureCompiler | None = None,
        *,
        loading: Loading,
        cores: SharedCores | None = None,
    ) -> None:
        self._config = config
        self._loading = loading
        self._context = context
        self._runner = runner
        self._metrics = metrics
        section = config.worker
        self.role = parse_role(section.role)
        self.cordoned = False
        self.worker_id = WorkerId(section.id or f"{self.role.value}-{context.host}-{context.port}")
        # Milliseconds since 1970, so that a restarted worker's incarnation is larger.
        self.incarnation = time.time_ns() // 1_000_000
        self._clock = SystemClock()
        self._copier = ThreadCopier()
        self._prompt_time = PromptTime(config.engine.max_batch_tokens)
        self._swap = make_swap_space(
            config.engine, runner, self._prompt_time, self._clock, self._copier
        )
        self.core = EngineCore(
            runner.spec,
            runner.kv.num_blocks,
            BatchLimits(max_tokens=config.engine.max_batch_tokens),
            config.engine.growth_tokens,
            config.engine.state_interval_tokens,
            structures.constraint if structures is not None else None,
            self._swap,
        )
        self._disk = ThreadCopier("disk")
        tier_parts = TierParts(
            self.worker_id,
            self.core,
            runner,
            self._prompt_time,
            self._clock,
            self._copier,
            self._disk,
        )
        self.tiers = make_tiers(config.tiers, tier_parts, make_outside(config.outside, runner.spec))
        self._structures = structures
        self._cores = cores
        self._loop = EngineLoop(self.core, runner, self._after_step, cores)
        self._copier.on_done = self._loop.wake
        self._starved = StarvedTime(partial(read_threads, os.getpid()))
        self._steps = StepMeter(config.engine.max_batch_tokens)

    async def start(self) -> None:
        """Opens the data channel, adds the services, joins the mesh."""
        section, context = self._config.worker, self._context
        await context.direct.start()
        parts = self._parts()
        self.channels = ChannelPool(
            self._channel_identity(),
            self._runner.kv,
            send_options(self._config),
            observer=self._metrics.observe_transfer,
        )
        context.stack.push_async_callback(self.channels.close)
        self.peers = PeerConnector(self.worker_id, self.channels.open, self._notify)
        self.decode = DecodeRole(parts, slots=section.decode_slots, lease_s=section.lease_s)
        self.core.set_rules(self.decode.pace.rules(self.role))
        arriving, fetch = self.decode.arriving, self._config.fetch
        self.pool = make_pool(fetch, parts, arriving, self.tiers, self._publish)
        pool_metrics = PoolMetrics(self._metrics.registry)
        pool_metrics.watch_leases(self.pool.statistics)
        self.fetcher: PrefixFetcher = start_fetcher(
            context,
            self._config,
            parts,
            self._channel_identity(),
            pool_metrics,
            self._publish,
            self.channels.staging,
        )
        self.query_metrics = QueryMetrics(self._metrics.registry)
        self.queries = start_queries(
            context,
            self._config,
            parts,
            self._runner,
            self._channel_identity(),
            self.query_metrics,
            self.channels.egress,
        )
        reads = PrefixSources(self.core, self.fetcher, self.queries)
        sources = reads if self._config.fetch.enabled else None
        self.prefill = PrefillRole(
            parts,
            self.channels,
            self.decode,
            PrefixWays(sources, self.queries, self.tiers, self._chain(parts)),
            slots=section.prefill_slots,
            mode=transfer_mode(section.transfer_mode),
        )
        data_endpoint = await self._listen_for_kv()
        add = context.add_servicer
        add(prefill_service_pb2_grpc.add_PrefillServiceServicer_to_server, self.prefill)
        add(decode_service_pb2_grpc.add_DecodeServiceServicer_to_server, self.decode)
        add(kv_pool_service_pb2_grpc.add_KvPoolServiceServicer_to_server, self.pool)
        self._join_mesh(data_endpoint)
        self._spawn_loops()

    def _chain(self, parts: WorkerParts) -> PromptChain | None:
        if not self._runner.pair_share:
            return None
        self.chain_metrics = ChainMetrics(self._metrics.registry)
        return PromptChain(parts, self.decode.arriving, self.chain_metrics, self._context.access)

    def _parts(self) -> WorkerParts:
        return WorkerParts(
            identity=WorkerIdentity(self.worker_id, self.incarnation),
            core=self.core,
            memory=self._runner.kv,
            clock=self._clock,
            wake_engine=self._loop.wake,
            on_change=self._notify,
            on_prompt=self._took_prompt,
            on_reservation=self._took_reservation,
            metrics=self._metrics,
            direct=self._context.direct,
            prompt_time=self._prompt_time,
        )

    def _spawn_loops(self) -> None:
        context = self._context
        if self._structures is not None:
            wake = partial(asyncio.get_running_loop().call_soon_threadsafe, self._loop.wake)
            self._structures.on_compiled = wake
        context.spawn(self._loop.run(), "engine")
        context.spawn(self._copier.run(), "swap")
        if self._swap is not None:
            context.stack.callback(self._swap.close)
        if self.tiers is not None:
            start_tiers(context, self.tiers, self._disk)
            collector = TierCollector(self.tiers.statistics, self.prefill.prefetches)
            self._metrics.registry.register(collector)
        context.spawn(self.decode.watch_leases(), "leases")
        context.spawn(self.pool.watch_leases(), "read leases")
        context.on_drain(self._drain)

    async def _listen_for_kv(self) -> Endpoint:
        self.answers = answer_queries(
            *(self._runner, self.core, self.decode.arriving, self.pool, self.query_metrics),
            self._config.fetch.max_queries,
        )
        server = DataServer(
            self._channel_identity(),
            self.decode.arriving,
            dataclasses.replace(receive_options(self._config), egress=self.channels.egress),
            source=self.pool,
            queries=self.answers,
            memory=self._runner.kv,
            observer=self._metrics.observe_transfer,
        )
        try:
            bound = await server.start()
        except OSError as error:
            port = self._config.worker.data_port
            raise ConfigError(
                f"data port {port}: {error.strerror}; choose another with --worker.data-port"
            ) from error
        self._context.stack.push_async_callback(server.close)
        asking = [] if self.queries is None else [self.queries.statistics]
        self._metrics.watch_links(
            self.channels.statistics, server.statistics, self.fetcher.statistics, *asking
        )
        endpoint = Endpoint(self._context.host, bound.endpoint.port)
        self.decode.arriving.data_endpoint = self.pool.data_endpoint = endpoint
        self.decode.arriving.host_route = self.pool.host_route = self.peers.host_route = bound.route
        return endpoint

    def _channel_identity(self) -> ChannelIdentity:
        layout, secret = self._runner.spec.layout, self._context.access.secret
        return ChannelIdentity(self.worker_id, self.incarnation, layout, secret)

    def _describe(self, data_endpoint: Endpoint) -> WorkerInfo:
        section, spec = self._config.worker, self._runner.spec
        self._metrics.show_native(levels := native_levels(self._config.engine))
        return WorkerInfo(
            worker_id=self.worker_id,
            incarnation=self.incarnation,
            role=self.role,
            cluster=section.cluster,
            control_endpoint=Endpoint(self._context.host, self._context.port),
            data_endpoint=data_endpoint,
            model=spec.name,
            layout=spec.layout,
            max_model_len=self.core.max_model_len,
            prefill_slots=section.prefill_slots,
            decode_slots=section.decode_slots,
            num_blocks=self._runner.kv.num_blocks,
            scenario=section.scenario,
            publishes=bool(section.kvmanager_target),
            missing_native=tuple(sorted(name for name, level in levels.items() if not level)),
            origin=self._loading.origin(self._config.engine.model, time.time()),
            pair_share=self._runner.pair_share,
            adapters=spec.adapters,
            embeds=spec.embedding is not None,
            groups=spec.groups,
            shared_cores="" if self._cores is None else self._cores.name,
        )

    def _join_mesh(self, data_endpoint: Endpoint) -> None:
        section, spec = self._config.worker, self._runner.spec
        self._info = self._describe(data_endpoint)
        started = started_adapters(self._config.engine.lora, spec.adapters)
        self._adapters = WorkerAdapters(
            *(self.core, self._runner.adapter_places, started, self._loop.between_steps),
            on_change=self._have_adapters,
        )
        orders = self._ordered_to_cordon, self._ordered_to_be, self._adapters.wish
        self._registration = SchedulerRegistration(
            section.schedulers,
            self._info,
            with_device_errors(
                self._context,
                self._config.engine.device,
                self.report,
                self._config.engine.host_ranks,
            ),
            self._ordered_to_drain,
            self._context.access,
            operator=OperatorHooks(self.detail, *orders),
            peers=PeerHooks(self.peers.name, self.peers.report),
        )
        self.wait_registered = self._registration.wait_registered
        self._adapters.on_report = self._registration.report_adapters
        self._context.spawn(self._registration.run(), "registration")
        self._context.spawn(self._adapters.run(), "adapters")
        self._context.spawn(self.peers.run(), "peers")
        self._publisher: BlockPublisher | None = None
        if section.kvmanager_target:
            self.copies = PoolCopies(
                self.core,
                self._info.control_endpoint,
                lambda: self.role,
                lambda: self._info.scenario,
                self.fetcher.fetch,
                lambda: self.pool.read_blocks_total + self.query_metrics.read_blocks_total,
                lambda: self.pool.draining or self.cordoned,
                self._clock,
            )
            self._publisher = BlockPublisher(
                section.kvmanager_target,
                PublisherFacts.of(self._info),
                take_events=self.core.pool.take_events,
                held_hashes=self.core.pool.told_names,
                access=self._context.access,
                pool=self.copies,
            )
            self.copies.on_answer = self._publisher.answer_order
            self._context.spawn(self._publisher.run(), "publisher")
            self._context.spawn(self.copies.run(), "pool copies")
        self._kv_events = start_kv_events(self._context, self._config, self.core)

    def _notify(self) -> None:
        self._registration.notify()

    def _took_prompt(self, request_id: RequestId) -> None:
        self._registration.took_prompt(request_id)

    def _took_reservation(self, request_id: RequestId) -> None:
        self._registration.took_reservation(request_id)

    def _after_step(self, seconds: float) -> None:
        self._metrics.step_seconds.observe(seconds)
        computed, generated = self.core.token_totals
        self._steps.add(seconds, computed, generated, self._clock.now())
        prompts = self.decode.pace.observe(seconds, self._steps.last_prompt_tokens)
        self.core.set_rules(self.decode.pace.rules(self.role))
        if prompts is not None and (self.queries is None or not self.queries.has_asked()):
            self._prompt_time.add(*prompts)
        self._publish()
        if self._kv_events is not None:
            self._kv_events.notify()

    def _publish(self) -> None:
        if self._publisher is not None:
            self._publisher.notify()

    def _ordered_to_drain(self, reason: str) -> None:
        log.info("drain_ordered", reason=reason)
        if not self.decode.draining:
            self._context.spawn(self._leave(), "ordered drain")

    async def _leave(self) -> None:
        """Leaves the mesh. The process stays until it is ended, unless it was an empty spare."""
        await self._drain()
        await self._context.set_serving(False)
        log.info("left_the_fleet")
        if self._loading.assignment is not None:
            self._context.stop.set()  # its next life is an empty spare again

    def _ordered_to_cordon(self, cordoned: bool, reason: str) -> None:
        log.info("cordon_ordered", cordoned=cordoned, reason=reason)
        self.cordoned = cordoned
        self._notify()

    def _ordered_to_be(self, role: Role, scenario: str | None, reason: str) -> None:
        """Takes another role.

        Both sides keep running: the role tells routes how to use the worker, and orders its steps.
        """
        log.info("role_ordered", role=role.value, before=self.role.value, reason=reason)
        told = self._info.scenario if scenario is None else scenario
        if (role, told) != (self.role, self._info.scenario):
            self.role = role
            self.core.set_rules(self.decode.pace.rules(role))
            self._info = dataclasses.replace(self._info, role=role, scenario=told)
            self._registration.update(self._info)

    def _have_adapters(self, ids: tuple[str, ...]) -> None:
        self._info = dataclasses.replace(self._info, adapters=ids)
        self._registration.update(self._info)

    async def _drain(self) -> None:
        """Drains prefill first, since its KV must be taken before the process may go; readers last.

        However it ends, also by a timeout, schedulers are told that the worker leaves, so that they
        need not notice its silence.
        """
        # All at once, so that the next load report keeps routes away from both sides.
        self.decode.draining = self.prefill.draining = self.pool.draining = True
        reason = "cut off"
        try:
            await self.prefill.drain()
            await self.decode.drain()
            if self._publisher is not None and self._publisher.connected:
                # Blocks that are read and that only this worker holds are copied meanwhile.
                await asyncio.sleep(self._config.fetch.leave_s)
            await self._readers_out()
            reason = "drained"
        finally:
            await self._registration.goodbye(reason)

    async def _readers_out(self) -> None:
        """Waits for readers, at most as long as a drain may take: they can compute instead."""
        limit_s = self._config.server.drain_s
        try:
            async with asyncio.timeout(limit_s):
                await self.pool.drain()
        except TimeoutError:
            log.warning("readers_left", num_leases=self.pool.statistics().num_open)

    def load(self) -> WorkerLoad:
        """The present load of this worker. Metrics read it in another thread."""
        now, at = self.core.statistics(), self._clock.now()
        asked_bytes = 0 if self.queries is None else self.queries.sent_bytes
        return WorkerLoad(
            prefill_active=self.prefill.num_attempts,
            decode_running=self.decode.num_tasks - self.decode.num_reserved,
            decode_reserved=self.decode.num_reserved,
            decode_preempted=now.num_preempted,
            blocks_free=now.blocks_free,
            draining=self.decode.draining or self.cordoned,
            prefill_tokens_total=now.computed_tokens_total,
            decode_tokens_total=now.generated_tokens_total,
            prefill_sending=self.prefill.num_sending,
            pending_tokens=self.core.pending_tokens,
            budget_used=self._steps.budget_used(at),
            compute_used=self._steps.compute_used(at),
            memory_bandwidth_used=self._steps.memory_bandwidth_used(at),
            sent_bytes_total=self.channels.sent_bytes + asked_bytes,
            sending_bytes=self.channels.sending_bytes,
            sending_s_total=self.channels.sending_s,
            damaged_total=now.damaged_total,
            host_token_s=0.0 if self.tiers is None else self.tiers.token_s(HOST),
            disk_token_s=0.0 if self.tiers is None else self.tiers.token_s(DISK),
        )

    def report(self) -> WorkerLoad:
        """The load with step times and the room that they leave. Call it only on the event loop."""
        now = asyncio.get_running_loop().time()
        steps = self._loop.watch.state(now, self._starved.total_s(now))
        return dataclasses.replace(
            self.load(),
            step_age_s=steps.age_s,
            step_expected_s=steps.expected_s,
            slowdown=steps.slowdown,
            room=self.decode.pace.room(self._clock.now()),
        )

    def detail(self) -> WorkerDetail:
        """Details of this worker for people."""
        data = self._config.data
        links = {**self.channels.statistics().links, **self.fetcher.statistics().links}
        if self.queries is not None:
            links |= self.queries.statistics().links
        return worker_detail(
            self.core,
            links,
            cordoned=self.cordoned,
            budget_bytes_s=max(data.budget_mb_s, data.egress_mb_s) * MEGABYTE,  # one of them is 0
        )

    @property
    def is_idle(self) -> bool:
        """Whether no block, slot, reservation, lease, read, write or attempt is held."""
        roles = self.decode.is_idle and self.prefill.num_attempts == 0
        lent = self.pool.is_idle and (self.answers is None or not self.answers.num_open)
        prefetches = self.prefill.prefetches
        tiers = self.tiers is None or self.tiers.is_idle
        tiers = tiers and (prefetches is None or not prefetches.num_running)
        return self.core.is_idle and roles and lent and self.fetcher.is_idle and tiers
