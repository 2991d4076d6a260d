use axum::http::{HeaderName, HeaderValue};
use zernel_identity::Tenant;

use super::*;

const TEST_TOKEN: &str = "0123456789/+=abcdef";

const TRUSTED_GRANT: AccessGrant = AccessGrant {
    scope: Scope::All,
    owner: ConnectionOwner::Trusted,
};
const ANONYMOUS_GRANT: AccessGrant = AccessGrant {
    scope: Scope::All,
    owner: ConnectionOwner::Anonymous,
};
const MACHINE_GRANT: AccessGrant = AccessGrant {
    scope: Scope::Machine,
    owner: ConnectionOwner::Anonymous,
};
const TOKEN_REFUSAL: RequestRefusal = RequestRefusal::TokenMissing { file: None };

fn authorize_request(
    expose: Expose,
    uri: &'static str,
    headers: &[(&'static str, &'static str)],
) -> Result<AccessGrant, RequestRefusal> {
    let policy = AccessPolicy {
        expose,
        token: (expose != Expose::All).then(|| Secret::new(TEST_TOKEN).unwrap()),
        hosts: vec![Host::Name("gpu7".into())],
    };
    let local = "10.0.0.7".parse().unwrap();
    let headers: HeaderMap = headers
        .iter()
        .map(|(name, value)| {
            let name = HeaderName::from_static(name);
            (name, HeaderValue::from_static(value))
        })
        .fold(HeaderMap::new(), |mut map, (name, value)| {
            map.append(name, value);
            map
        });
    policy.authorize_request(&Peer::Tcp { local }, &Uri::from_static(uri), &headers)
}

#[test]
fn the_host_header_must_name_this_machine() {
    for host in ["localhost", "10.0.0.7:9091", "gpu7:9091", "[::1]:9091"] {
        assert_eq!(
            authorize_request(Expose::All, "/", &[("host", host)]),
            Ok(ANONYMOUS_GRANT),
            "{host}"
        );
    }
    for host in ["evil.example", "10.0.0.8", "gpu77", "", "a b"] {
        assert_eq!(
            authorize_request(Expose::All, "/", &[("host", host)]),
            Err(RequestRefusal::UnknownHost),
            "{host}"
        );
    }
    assert_eq!(
        authorize_request(Expose::All, "/", &[]),
        Err(RequestRefusal::UnknownHost)
    );
    let two = [("host", "localhost"), ("host", "localhost")];
    assert_eq!(
        authorize_request(Expose::All, "/", &two),
        Err(RequestRefusal::UnknownHost)
    );
}

#[test]
fn a_host_in_the_request_line_is_checked_too() {
    let host = [("host", "localhost")];
    assert_eq!(
        authorize_request(Expose::All, "http://localhost/", &host),
        Ok(ANONYMOUS_GRANT)
    );
    assert_eq!(
        authorize_request(Expose::All, "http://evil.example/", &host),
        Err(RequestRefusal::UnknownHost)
    );
}

#[test]
fn an_origin_of_another_host_is_refused() {
    let from =
        |origin| authorize_request(Expose::All, "/", &[("host", "gpu7"), ("origin", origin)]);
    for origin in ["http://gpu7", "https://gpu7:3000", "http://localhost:3000"] {
        assert_eq!(from(origin), Ok(ANONYMOUS_GRANT), "{origin}");
    }
    // The host is allowed, but the page that sends the request is foreign.
    for origin in ["http://evil.example", "null", "", "http://10.0.0.8"] {
        assert_eq!(from(origin), Err(RequestRefusal::ForeignOrigin), "{origin}");
    }
}

#[test]
fn the_authorization_header_must_carry_the_token() {
    let with = |value| {
        let headers = [("host", "gpu7"), ("authorization", value)];
        authorize_request(Expose::Token, "/metrics", &headers)
    };
    assert_eq!(with("Bearer 0123456789/+=abcdef"), Ok(TRUSTED_GRANT));
    assert_eq!(with("bearer  0123456789/+=abcdef"), Ok(TRUSTED_GRANT));
    for value in [
        "",
        "Bearer",
        "Bearer ",
        "Basic 0123456789/+=abcdef",
        "Bearer 1",
    ] {
        assert_eq!(with(value), Err(TOKEN_REFUSAL), "{value}");
    }
}

#[test]
fn only_a_websocket_may_pass_the_token_in_the_query() {
    let host = ("host", "gpu7");
    let upgrade = ("upgrade", "WebSocket");
    for uri in [
        "/ws?token=0123456789/+=abcdef",
        "/ws?a=b&token=0123456789%2F%2B%3Dabcdef",
    ] {
        assert_eq!(
            authorize_request(Expose::Token, uri, &[host, upgrade]),
            Ok(TRUSTED_GRANT)
        );
        assert_eq!(
            authorize_request(Expose::Token, uri, &[host]),
            Err(TOKEN_REFUSAL)
        );
    }
    let wrong = authorize_request(Expose::Token, "/ws?token=", &[host, upgrade]);
    assert_eq!(wrong, Err(TOKEN_REFUSAL));
}

#[test]
fn health_without_a_token_shows_the_machine_alone() {
    let health = authorize_request(Expose::Token, "/healthz", &[("host", "gpu7")]);
    assert_eq!(health, Ok(MACHINE_GRANT));
    assert_eq!(
        authorize_request(Expose::Token, "/healthz", &[("host", "x")]),
        Err(RequestRefusal::UnknownHost)
    );
}

#[test]
fn aggregates_need_no_token_and_processes_do() {
    let host = ("host", "gpu7");
    let anonymous = authorize_request(Expose::Aggregate, "/api/v1/snapshot", &[host]);
    assert_eq!(anonymous, Ok(MACHINE_GRANT));
    let token = ("authorization", "Bearer 0123456789/+=abcdef");
    let trusted = authorize_request(Expose::Aggregate, "/api/v1/snapshot", &[host, token]);
    assert_eq!(trusted, Ok(TRUSTED_GRANT));
    let wrong = ("authorization", "Bearer 0123456789/+=abcdeX");
    let anonymous = authorize_request(Expose::Aggregate, "/api/v1/snapshot", &[host, wrong]);
    assert_eq!(anonymous, Ok(MACHINE_GRANT));
}

#[test]
fn a_refusal_names_the_file_and_the_lines_for_prometheus() {
    let file = Some("/var/lib/zernel/token".into());
    let text = RequestRefusal::TokenMissing { file }.to_string();
    for part in [
        "    authorization:\n      credentials_file: /var/lib/zernel/token\n",
        "--expose all",
        "unix socket",
    ] {
        assert!(text.contains(part), "{text}");
    }
}

#[test]
fn unix_socket_clients_need_no_host_and_no_token() {
    let policy = AccessPolicy {
        expose: Expose::Token,
        token: Some(Secret::new(TEST_TOKEN).unwrap()),
        hosts: Vec::new(),
    };
    let scope = Scope::User(1);
    let tenant = Tenant::User(1);
    let owner = ConnectionOwner::Tenant(tenant.clone());
    let peer = Peer::Unix { scope, tenant };
    let authorized = policy.authorize_request(&peer, &Uri::from_static("/"), &HeaderMap::new());
    assert_eq!(authorized, Ok(AccessGrant { scope, owner }));
}
