"""Operations on the engine as a whole, for threads: the twins of :class:`EngineOperations`.

Owns which there are. What each does, and what it raises, is said there.
"""

from __future__ import annotations

from anyengine._client.client import EngineClient

from .client_thread import ClientThread
from .methods import blocking, entering

__all__ = ["SyncEngineOperations"]


class SyncEngineOperations:
    """Part of :class:`SyncEngineClient`. Lifetime: the client's."""

    def _running(self) -> ClientThread:
        raise NotImplementedError

    @blocking(EngineClient.pause_generation)
    def pause_generation(self) -> None:
        """See :meth:`EngineClient.pause_generation`."""

    @blocking(EngineClient.resume_generation)
    def resume_generation(self) -> None:
        """See :meth:`EngineClient.resume_generation`."""

    @blocking(EngineClient.is_paused)
    def is_paused(self) -> None:
        """See :meth:`EngineClient.is_paused`."""

    @entering(EngineClient.paused)
    def paused(self) -> None:
        """``with client.paused():``. See :meth:`EngineClient.paused`."""

    @blocking(EngineClient.sleep)
    def sleep(self) -> None:
        """See :meth:`EngineClient.sleep`."""

    @blocking(EngineClient.wake_up)
    def wake_up(self) -> None:
        """See :meth:`EngineClient.wake_up`."""

    @entering(EngineClient.sleeping)
    def sleeping(self) -> None:
        """``with client.sleeping():``. See :meth:`EngineClient.sleeping`."""

    @blocking(EngineClient.is_sleeping)
    def is_sleeping(self) -> None:
        """See :meth:`EngineClient.is_sleeping`."""

    @blocking(EngineClient.release_kv_cache_memory)
    def release_kv_cache_memory(self) -> None:
        """See :meth:`EngineClient.release_kv_cache_memory`."""

    @blocking(EngineClient.reset_prefix_cache)
    def reset_prefix_cache(self) -> None:
        """See :meth:`EngineClient.reset_prefix_cache`."""

    @blocking(EngineClient.reset_mm_cache)
    def reset_mm_cache(self) -> None:
        """See :meth:`EngineClient.reset_mm_cache`."""

    @blocking(EngineClient.reset_encoder_cache)
    def reset_encoder_cache(self) -> None:
        """See :meth:`EngineClient.reset_encoder_cache`."""

    @blocking(EngineClient.add_lora)
    def add_lora(self) -> None:
        """See :meth:`EngineClient.add_lora`."""

    @blocking(EngineClient.remove_lora)
    def remove_lora(self) -> None:
        """See :meth:`EngineClient.remove_lora`."""

    @blocking(EngineClient.list_loras)
    def list_loras(self) -> None:
        """See :meth:`EngineClient.list_loras`."""

    @blocking(EngineClient.pin_lora)
    def pin_lora(self) -> None:
        """See :meth:`EngineClient.pin_lora`."""

    @blocking(EngineClient.update_weight_version)
    def update_weight_version(self) -> None:
        """See :meth:`EngineClient.update_weight_version`."""

    @blocking(EngineClient.get_weight_version)
    def get_weight_version(self) -> None:
        """See :meth:`EngineClient.get_weight_version`."""

    @blocking(EngineClient.compute_weight_checksums)
    def compute_weight_checksums(self) -> None:
        """See :meth:`EngineClient.compute_weight_checksums`."""

    @blocking(EngineClient.init_weight_transfer_engine)
    def init_weight_transfer_engine(self) -> None:
        """See :meth:`EngineClient.init_weight_transfer_engine`."""

    @blocking(EngineClient.shutdown_weight_transfer_engine)
    def shutdown_weight_transfer_engine(self) -> None:
        """See :meth:`EngineClient.shutdown_weight_transfer_engine`."""

    @blocking(EngineClient.start_weight_update)
    def start_weight_update(self) -> None:
        """See :meth:`EngineClient.start_weight_update`."""

    @blocking(EngineClient.start_draft_weight_update)
    def start_draft_weight_update(self) -> None:
        """See :meth:`EngineClient.start_draft_weight_update`."""

    @blocking(EngineClient.update_weights)
    def update_weights(self) -> None:
        """See :meth:`EngineClient.update_weights`."""

    @blocking(EngineClient.finish_weight_update)
    def finish_weight_update(self) -> None:
        """See :meth:`EngineClient.finish_weight_update`."""

    @entering(EngineClient.weight_update)
    def weight_update(self) -> None:
        """``with client.weight_update():``. See :meth:`EngineClient.weight_update`."""

    @blocking(EngineClient.checkpoint_prepare)
    def checkpoint_prepare(self) -> None:
        """See :meth:`EngineClient.checkpoint_prepare`."""

    @blocking(EngineClient.checkpoint_restore)
    def checkpoint_restore(self) -> None:
        """See :meth:`EngineClient.checkpoint_restore`."""

    @blocking(EngineClient.notify_kv_transfer_request_rejected)
    def notify_kv_transfer_request_rejected(self) -> None:
        """See :meth:`EngineClient.notify_kv_transfer_request_rejected`."""

    @blocking(EngineClient.handle_fault)
    def handle_fault(self) -> None:
        """See :meth:`EngineClient.handle_fault`."""

    @blocking(EngineClient.get_status)
    def get_status(self) -> None:
        """See :meth:`EngineClient.get_status`."""

    @blocking(EngineClient.is_tracing_enabled)
    def is_tracing_enabled(self) -> None:
        """See :meth:`EngineClient.is_tracing_enabled`."""

    @blocking(EngineClient.save_sharded_state)
    def save_sharded_state(self) -> None:
        """See :meth:`EngineClient.save_sharded_state`."""

    @blocking(EngineClient.collective_rpc)
    def collective_rpc(self) -> None:
        """See :meth:`EngineClient.collective_rpc`."""

    @blocking(EngineClient.supported_tasks)
    def supported_tasks(self) -> None:
        """See :meth:`EngineClient.supported_tasks`."""

    @blocking(EngineClient.execute_dummy_batch)
    def execute_dummy_batch(self) -> None:
        """See :meth:`EngineClient.execute_dummy_batch`."""

    @blocking(EngineClient.get_kv_cache_group_metadata)
    def get_kv_cache_group_metadata(self) -> None:
        """See :meth:`EngineClient.get_kv_cache_group_metadata`."""

    @blocking(EngineClient.start_profile)
    def start_profile(self) -> None:
        """See :meth:`EngineClient.start_profile`."""

    @blocking(EngineClient.stop_profile)
    def stop_profile(self) -> None:
        """See :meth:`EngineClient.stop_profile`."""
