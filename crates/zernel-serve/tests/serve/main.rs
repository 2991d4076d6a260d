//! The server as its clients see it.

mod client;
mod fixture;
mod http;
mod lifecycle;
mod peers;
mod websocket;

use std::process::ExitCode;
use std::time::Duration;

use tokio::runtime::Builder;
use tokio::time::timeout;
use zernel_testkit::{Need, root, trial};

/// By then a test hangs.
const HANGS: Duration = Duration::from_secs(120);

macro_rules! trials {
    ($needs:expr; $($module:ident::$test:ident,)*) => {
        [$(asynchronous(concat!(stringify!($module), "::", stringify!($test)), $needs, $module::$test)),*]
    };
}

fn asynchronous<F: Future<Output = ()>>(
    name: &str,
    needs: &[Need],
    test: impl FnOnce() -> F + Send + 'static,
) -> libtest_mimic::Trial {
    trial(name, needs, move || {
        let runtime = Builder::new_current_thread().enable_all().build().unwrap();
        let result = runtime.block_on(async { timeout(HANGS, test()).await });
        runtime.shutdown_background();
        result.expect("the test hangs");
    })
}

fn main() -> ExitCode {
    let plain = trials![&[];
        http::every_endpoint_in_the_index_is_there,
        http::the_format_of_metrics_is_negotiated,
        http::quantiles_snapshot_and_ledger_are_served,
        http::head_is_get_without_the_body,
        http::nothing_can_be_written,
        http::unknown_paths_get_a_hint,
        http::health_says_what_is_wrong,
        http::foreign_hosts_and_origins_are_refused,
        http::a_token_is_asked_for,
        http::rubbish_is_refused_and_does_no_harm,
        http::floods_of_headers_are_cut_off,
        http::who_never_finishes_a_request_is_cut_off,
        http::who_never_reads_an_answer_is_cut_off,
        http::a_source_that_panics_is_an_error_of_the_server,
        websocket::the_first_snapshot_comes_at_once_on_every_path,
        websocket::further_ones_follow,
        websocket::one_snapshot_serves_all,
        websocket::without_clients_no_snapshot_is_taken,
        websocket::a_slow_reader_delays_no_one_and_skips,
        websocket::who_accepts_nothing_is_dropped,
        websocket::pings_are_answered_and_words_ignored,
        websocket::malformed_and_big_frames_end_the_connection,
        websocket::there_are_64_places,
        websocket::foreign_pages_are_refused,
        websocket::a_token_may_stand_in_the_address,
        websocket::other_requests_are_told_what_this_is,
        lifecycle::a_port_in_use_is_named_and_nothing_is_left_behind,
        lifecycle::the_open_network_needs_a_token,
        lifecycle::an_address_that_is_not_ours_is_named,
        lifecycle::senseless_options_are_refused,
        lifecycle::two_servers_cannot_share_a_socket,
        lifecycle::the_socket_goes_with_the_server,
        lifecycle::requests_in_flight_end_first,
        lifecycle::a_source_that_hangs_does_not_keep_the_server,
        lifecycle::live_clients_get_a_farewell,
        lifecycle::a_farewell_waits_for_its_answer,
        lifecycle::one_that_lags_behind_gets_it_too,
        lifecycle::idle_and_half_begun_connections_do_not_keep_it,
        lifecycle::a_thread_is_enough,
        lifecycle::a_crowd_at_one_address_keeps_no_one_from_another,
        peers::the_daemons_own_user_sees_all,
    ];
    let privileged = trials![&[root()];
        peers::other_users_see_their_own,
        peers::other_users_watch_their_own,
    ];
    zernel_testkit::main(plain.into_iter().chain(privileged))
}
