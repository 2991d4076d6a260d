//! Tests of the server through its sockets.

mod client;
mod fixture;
mod http;
mod lifecycle;
mod limits;
mod peers;
mod websocket;

use std::process::ExitCode;
use std::time::Duration;

use tokio::runtime::Builder;
use tokio::time::timeout;
use zernel_testkit::{Need, root, trial};

/// A test that runs longer hangs.
const TEST_TIMEOUT: Duration = Duration::from_secs(120);

macro_rules! trials {
    ($needs:expr; $($module:ident::$test:ident,)*) => {
        [$(asynchronous_trial(concat!(stringify!($module), "::", stringify!($test)), $needs, $module::$test)),*]
    };
}

fn asynchronous_trial<F: Future<Output = ()>>(
    name: &str,
    needs: &[Need],
    test: impl FnOnce() -> F + Send + 'static,
) -> libtest_mimic::Trial {
    trial(name, needs, move || {
        let runtime = Builder::new_current_thread().enable_all().build().unwrap();
        let result = runtime.block_on(async { timeout(TEST_TIMEOUT, test()).await });
        runtime.shutdown_background();
        result.expect("the test hangs");
    })
}

fn main() -> ExitCode {
    let plain = trials![&[];
        http::every_endpoint_in_the_index_answers,
        http::the_format_of_metrics_is_negotiated,
        http::quantiles_snapshot_and_ledger_are_served,
        http::head_returns_the_headers_of_get_without_a_body,
        http::methods_other_than_get_and_head_are_refused,
        http::unknown_paths_get_a_hint,
        http::health_lists_the_problems,
        http::foreign_hosts_and_origins_are_refused,
        http::requests_without_the_token_are_refused,
        http::aggregates_are_served_without_the_token,
        http::malformed_requests_get_400_and_the_server_keeps_serving,
        http::too_many_or_too_long_headers_end_the_connection,
        http::a_client_that_never_finishes_its_request_is_disconnected,
        http::a_client_that_never_reads_its_response_is_disconnected,
        http::a_panic_in_the_source_is_status_500,
        websocket::every_websocket_path_sends_a_snapshot_at_once,
        websocket::a_new_snapshot_follows_at_every_interval,
        websocket::all_clients_share_one_snapshot,
        websocket::no_snapshot_is_taken_without_clients,
        websocket::a_slow_client_skips_snapshots_and_delays_no_other_client,
        websocket::a_client_that_reads_nothing_is_disconnected,
        websocket::pings_are_answered_and_messages_ignored,
        websocket::malformed_and_oversized_frames_end_the_connection,
        websocket::websocket_client_65_gets_503,
        websocket::websockets_of_foreign_origins_are_refused,
        websocket::a_websocket_may_pass_the_token_in_the_query,
        websocket::plain_requests_to_the_websocket_port_get_a_hint,
        lifecycle::a_port_in_use_is_reported_and_nothing_stays_bound,
        lifecycle::an_address_other_machines_reach_needs_a_token,
        lifecycle::a_server_without_a_token_must_expose_everything,
        lifecycle::the_error_for_a_foreign_address_names_the_address,
        lifecycle::a_zero_interval_and_a_bad_host_are_refused,
        lifecycle::a_unix_socket_in_use_is_refused_and_a_stale_one_replaced,
        lifecycle::shutdown_removes_the_unix_socket_and_closes_the_port,
        lifecycle::shutdown_waits_for_requests_in_flight,
        lifecycle::a_hanging_source_does_not_block_shutdown,
        lifecycle::websocket_clients_get_a_close_frame_at_shutdown,
        lifecycle::shutdown_waits_for_the_clients_close_frame,
        lifecycle::a_slow_websocket_client_gets_the_close_frame_too,
        lifecycle::idle_and_half_sent_requests_do_not_block_shutdown,
        lifecycle::the_server_runs_on_a_plain_thread,
        lifecycle::a_full_address_does_not_block_another_address,
        limits::clients_without_the_token_do_not_shut_out_clients_with_it,
        limits::websockets_without_the_token_do_not_shut_out_clients_with_it,
        peers::the_daemons_user_sees_all_processes,
    ];
    let privileged = trials![&[root()];
        limits::slow_clients_of_one_user_do_not_shut_out_others,
        limits::unread_answers_of_one_user_are_bounded,
        limits::idle_websockets_of_one_user_do_not_shut_out_others,
        peers::other_users_see_only_their_processes,
        peers::other_users_stream_only_their_processes,
    ];
    zernel_testkit::main(plain.into_iter().chain(privileged))
}
