//! Access control for requests.
//!
//! A web page can reach loopback addresses through a DNS name that it points at them (DNS
//! rebinding). So every TCP request must name a host of this machine, and its `Origin` must not be
//! foreign. If a token is configured, the request must carry it. Unix sockets need none of this:
//! browsers cannot reach them, and the kernel reports the client's user.

use std::net::IpAddr;
use std::sync::Arc;

use axum::Extension;
use axum::extract::{Request, State};
use axum::http::{HeaderMap, StatusCode, Uri, header};
use axum::middleware::Next;
use axum::response::{IntoResponse, Response};
use percent_encoding::percent_decode_str;

use crate::host::Host;
use crate::{Scope, Secret};

/// The client of a connection.
#[derive(Debug, Clone, Copy)]
pub(crate) enum Peer {
    /// A TCP client that connected to the address `local`.
    Tcp { local: IpAddr },
    /// A unix socket client, whose user decides the scope.
    Unix { scope: Scope },
}

impl Peer {
    pub(crate) fn scope(self) -> Scope {
        match self {
            Self::Tcp { .. } => Scope::All,
            Self::Unix { scope } => scope,
        }
    }
}

/// Whether a request has full access. Only paths in [`PATHS_WITHOUT_TOKEN`] accept requests without
/// it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Authenticated(pub(crate) bool);

/// The conditions that a TCP request must meet.
pub(crate) struct AccessPolicy {
    pub(crate) token: Option<Secret>,
    pub(crate) hosts: Vec<Host>,
}

/// The reason why a request is refused.
#[derive(Debug, thiserror::Error, PartialEq, Eq)]
pub(crate) enum Refusal {
    #[error(
        "the request must have exactly one Host header; it must name localhost, a loopback address, the address connected to, \
         or a host that the daemon is configured to allow"
    )]
    Host,
    #[error("the Origin header names a page on another host")]
    Origin,
    #[error(
        "this daemon requires a token: send `Authorization: Bearer …`, or for a WebSocket `?token=…`"
    )]
    Token,
}

/// Paths that answer without a token, in reduced form.
const PATHS_WITHOUT_TOKEN: [&str; 1] = ["/healthz"];

/// Middleware that passes authorized requests on and refuses all others.
pub(crate) async fn enforce(
    State(policy): State<Arc<AccessPolicy>>,
    Extension(peer): Extension<Peer>,
    mut request: Request,
    next: Next,
) -> Response {
    match policy.authorize(peer, request.uri(), request.headers()) {
        Ok(authenticated) => {
            request.extensions_mut().insert(authenticated);
            next.run(request).await
        }
        Err(refusal) => refusal.into_response(),
    }
}

impl AccessPolicy {
    fn authorize(
        &self,
        peer: Peer,
        uri: &Uri,
        headers: &HeaderMap,
    ) -> Result<Authenticated, Refusal> {
        let Peer::Tcp { local } = peer else {
            return Ok(Authenticated(true));
        };
        let host = self.check_host(local, uri, headers)?;
        check_origin(&host, headers)?;
        let authenticated = self.has_valid_token(uri, headers);
        match authenticated || PATHS_WITHOUT_TOKEN.contains(&uri.path()) {
            true => Ok(Authenticated(authenticated)),
            false => Err(Refusal::Token),
        }
    }

    fn check_host(&self, local: IpAddr, uri: &Uri, headers: &HeaderMap) -> Result<Host, Refusal> {
        let is_ours = |host: &Host| {
            host.is_loopback() || *host == Host::Address(local) || self.hosts.contains(host)
        };
        let mut named = headers.get_all(header::HOST).iter();
        let (Some(host), None) = (named.next(), named.next()) else {
            return Err(Refusal::Host);
        };
        // An absolute request target names a host too, and it takes precedence over the header.
        let also = uri
            .authority()
            .map(|authority| Host::parse(authority.as_str()));
        if also.is_some_and(|host| !host.is_some_and(|host| is_ours(&host))) {
            return Err(Refusal::Host);
        }
        let host = host.to_str().ok().and_then(Host::parse);
        host.filter(is_ours).ok_or(Refusal::Host)
    }

    fn has_valid_token(&self, uri: &Uri, headers: &HeaderMap) -> bool {
        let Some(token) = &self.token else {
            return true;
        };
        let in_header = headers
            .get(header::AUTHORIZATION)
            .and_then(|value| bearer(value.as_bytes()))
            .is_some_and(|offered| token.matches(offered));
        // Browsers cannot set headers on a WebSocket, so its token may be in the query. For other
        // requests a token in the URL would only end up in logs.
        let in_query = || {
            is_websocket(headers) && query_token(uri).is_some_and(|offered| token.matches(&offered))
        };
        in_header || in_query()
    }
}

/// Accepts only origins on the requested host or on a loopback address.
fn check_origin(host: &Host, headers: &HeaderMap) -> Result<(), Refusal> {
    for origin in headers.get_all(header::ORIGIN) {
        let origin = origin.to_str().ok().and_then(Host::parse_origin);
        if !origin.is_some_and(|origin| origin.is_loopback() || origin == *host) {
            return Err(Refusal::Origin);
        }
    }
    Ok(())
}

fn bearer(value: &[u8]) -> Option<&[u8]> {
    let (scheme, token) = value.split_at_checked("Bearer ".len())?;
    scheme
        .eq_ignore_ascii_case(b"Bearer ")
        .then_some(token.trim_ascii())
}

fn is_websocket(headers: &HeaderMap) -> bool {
    headers
        .get(header::UPGRADE)
        .is_some_and(|value| value.as_bytes().eq_ignore_ascii_case(b"websocket"))
}

fn query_token(uri: &Uri) -> Option<Vec<u8>> {
    let token = uri
        .query()?
        .split('&')
        .find_map(|pair| pair.strip_prefix("token="))?;
    Some(percent_decode_str(token).collect())
}

impl IntoResponse for Refusal {
    fn into_response(self) -> Response {
        let text = format!("{self}\n");
        match self {
            Self::Host | Self::Origin => (StatusCode::FORBIDDEN, text).into_response(),
            Self::Token => {
                let challenge = [(header::WWW_AUTHENTICATE, "Bearer realm=\"zernel\"")];
                (StatusCode::UNAUTHORIZED, challenge, text).into_response()
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use axum::http::{HeaderName, HeaderValue};

    use super::*;

    const TOKEN: &str = "0123456789/+=abcdef";

    fn authorize(
        token: Option<&str>,
        uri: &'static str,
        headers: &[(&'static str, &'static str)],
    ) -> Result<Authenticated, Refusal> {
        let policy = AccessPolicy {
            token: token.map(|token| Secret::new(token).unwrap()),
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
        policy.authorize(Peer::Tcp { local }, &Uri::from_static(uri), &headers)
    }

    #[test]
    fn the_host_header_must_name_this_machine() {
        for host in ["localhost", "10.0.0.7:9091", "gpu7:9091", "[::1]:9091"] {
            assert_eq!(
                authorize(None, "/", &[("host", host)]),
                Ok(Authenticated(true)),
                "{host}"
            );
        }
        for host in ["evil.example", "10.0.0.8", "gpu77", "", "a b"] {
            assert_eq!(
                authorize(None, "/", &[("host", host)]),
                Err(Refusal::Host),
                "{host}"
            );
        }
        assert_eq!(authorize(None, "/", &[]), Err(Refusal::Host));
        let two = [("host", "localhost"), ("host", "localhost")];
        assert_eq!(authorize(None, "/", &two), Err(Refusal::Host));
    }

    #[test]
    fn a_host_in_the_request_line_is_checked_too() {
        let host = [("host", "localhost")];
        assert_eq!(
            authorize(None, "http://localhost/", &host),
            Ok(Authenticated(true))
        );
        assert_eq!(
            authorize(None, "http://evil.example/", &host),
            Err(Refusal::Host)
        );
    }

    #[test]
    fn an_origin_of_another_host_is_refused() {
        let from = |origin| authorize(None, "/", &[("host", "gpu7"), ("origin", origin)]);
        for origin in ["http://gpu7", "https://gpu7:3000", "http://localhost:3000"] {
            assert_eq!(from(origin), Ok(Authenticated(true)), "{origin}");
        }
        // The host is allowed, but the page that sends the request is foreign.
        for origin in ["http://evil.example", "null", "", "http://10.0.0.8"] {
            assert_eq!(from(origin), Err(Refusal::Origin), "{origin}");
        }
    }

    #[test]
    fn the_authorization_header_must_carry_the_token() {
        let with = |value| {
            let headers = [("host", "gpu7"), ("authorization", value)];
            authorize(Some(TOKEN), "/metrics", &headers)
        };
        assert_eq!(with("Bearer 0123456789/+=abcdef"), Ok(Authenticated(true)));
        assert_eq!(with("bearer  0123456789/+=abcdef"), Ok(Authenticated(true)));
        for value in [
            "",
            "Bearer",
            "Bearer ",
            "Basic 0123456789/+=abcdef",
            "Bearer 1",
        ] {
            assert_eq!(with(value), Err(Refusal::Token), "{value}");
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
                authorize(Some(TOKEN), uri, &[host, upgrade]),
                Ok(Authenticated(true))
            );
            assert_eq!(authorize(Some(TOKEN), uri, &[host]), Err(Refusal::Token));
        }
        let wrong = authorize(Some(TOKEN), "/ws?token=", &[host, upgrade]);
        assert_eq!(wrong, Err(Refusal::Token));
    }

    #[test]
    fn health_without_a_token_is_allowed_but_unauthenticated() {
        let health = authorize(Some(TOKEN), "/healthz", &[("host", "gpu7")]);
        assert_eq!(health, Ok(Authenticated(false)));
        assert_eq!(
            authorize(Some(TOKEN), "/healthz", &[("host", "x")]),
            Err(Refusal::Host)
        );
    }

    #[test]
    fn unix_socket_clients_need_no_host_and_no_token() {
        let policy = AccessPolicy {
            token: Some(Secret::new(TOKEN).unwrap()),
            hosts: Vec::new(),
        };
        let peer = Peer::Unix {
            scope: Scope::User(1),
        };
        let authorized = policy.authorize(peer, &Uri::from_static("/"), &HeaderMap::new());
        assert_eq!(authorized, Ok(Authenticated(true)));
    }
}
