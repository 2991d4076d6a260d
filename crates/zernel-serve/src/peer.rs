//! The client of a connection: its scope, and the owner that its connections count for.

use std::io;
use std::net::IpAddr;
use std::os::fd::AsFd;
use std::sync::OnceLock;

use rustix::process::geteuid;
use tokio::net::{TcpStream, UnixStream};
use zernel_identity::{PeerHandle, PeerProcess, SubordinateUids, Tenant};
use zernel_model::snapshot::PodUid;

use crate::Scope;

/// The client that sends a request.
#[derive(Debug, Clone)]
pub(crate) enum Peer {
    /// A TCP client that connected to the address `local`. The user of the client is unknown; a token decides the
    /// scope of each request.
    Tcp { local: IpAddr },
    /// A unix socket client. The pod or user of the client decides the scope.
    Unix { scope: Scope, tenant: Tenant },
}

/// The party that a connection counts for. Each owner has its own share of the connections.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub(crate) enum ConnectionOwner {
    /// Root, the daemon's user, or a client with the token. Other owners cannot use up the connections of this one.
    Trusted,
    /// A client of the unix socket. Until the first request of the client, the connection counts for its user.
    Tenant(Tenant),
    /// All TCP clients without the token together.
    Anonymous,
}

/// The client of a connection. What a user without privilege may see is looked up at the first
/// request: a connection without one costs little.
#[derive(Debug)]
pub(crate) struct ConnectedClient {
    owner: ConnectionOwner,
    /// The user and the process of a unix socket client.
    unix: Option<(u32, Option<PeerHandle>)>,
    /// `None` if the client has exited.
    peer: OnceLock<Option<Peer>>,
}

impl ConnectedClient {
    pub(crate) fn from_tcp_stream(stream: &TcpStream) -> io::Result<Self> {
        let local = stream.local_addr()?.ip().to_canonical();
        Ok(Self {
            owner: ConnectionOwner::Anonymous,
            unix: None,
            peer: OnceLock::from(Some(Peer::Tcp { local })),
        })
    }

    pub(crate) fn from_unix_stream(stream: &UnixStream) -> io::Result<Self> {
        let user = stream.peer_cred()?.uid();
        let process = PeerHandle::open(stream.as_fd())?;
        let mut client = Self {
            owner: ConnectionOwner::Tenant(tenant_of_user(user)),
            unix: Some((user, process)),
            peer: OnceLock::new(),
        };
        // Connections of these users may count as trusted, so their process is looked up at once.
        if user == 0 || user == geteuid().as_raw() {
            let peer = client.read_peer().ok_or(io::ErrorKind::ConnectionAborted)?;
            client.owner = peer.owner();
        }
        Ok(client)
    }

    /// The owner of the connection before its first request.
    pub(crate) fn initial_owner(&self) -> ConnectionOwner {
        self.owner.clone()
    }

    /// Reads the process that sends the requests; `None` if the process has exited.
    pub(crate) fn read_peer(&self) -> Option<Peer> {
        let peer = self.peer.get_or_init(|| {
            let (user, process) = self.unix.as_ref()?;
            let process = process.as_ref().map(PeerHandle::read).transpose().ok()?;
            let scope = scope_of_client(*user, geteuid().as_raw(), process.as_ref());
            let tenant = tenant_of_client(*user, process);
            Some(Peer::Unix { scope, tenant })
        });
        peer.clone()
    }
}

impl Peer {
    /// The owner that the client's requests count for.
    pub(crate) fn owner(&self) -> ConnectionOwner {
        match self {
            Self::Tcp { .. } => ConnectionOwner::Anonymous,
            Self::Unix { scope, tenant } => match scope {
                Scope::All => ConnectionOwner::Trusted,
                Scope::User(_) | Scope::Pod(_) | Scope::Machine => {
                    ConnectionOwner::Tenant(tenant.clone())
                }
            },
        }
    }
}

/// The tenant of a client. Outside of pods, jobs and user namespaces, that is the user who connected.
fn tenant_of_client(user: u32, process: Option<PeerProcess>) -> Tenant {
    match process {
        Some(process)
            if !process.shares_user_namespace || !matches!(process.tenant, Tenant::User(_)) =>
        {
            process.tenant
        }
        _ => tenant_of_user(user),
    }
}

/// The tenant that a user counts for outside of pods and jobs. A user has many subordinate uids.
fn tenant_of_user(user: u32) -> Tenant {
    Tenant::User(SubordinateUids::read_from_machine().user_of(user))
}

/// Returns which processes a client of `user` may see, if the daemon runs as user `own`. No other code decides which
/// processes a unix socket client sees. A client in a pod sees the pod's processes: root in the pod is not root of
/// the machine, and users in the pod are other users than those of the machine with the same numbers. `process` is
/// `None` on kernels before 6.5; then the root of a container without a user namespace is taken for the root of the
/// machine.
fn scope_of_client(user: u32, own: u32, process: Option<&PeerProcess>) -> Scope {
    let is_outside = process.is_none_or(|process| process.shares_user_namespace);
    match process.map(|process| &process.tenant) {
        // Without a UID of the usual form the pod has no scope of its own.
        Some(Tenant::Pod(uid)) => PodUid::parse(uid).map_or(Scope::Machine, Scope::Pod),
        _ if is_outside && (user == 0 || user == own) => Scope::All,
        _ => Scope::User(user),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const POD_UID: &str = "0f0e0d0c-0b0a-0908-0706-050403020100";

    fn peer_process(tenant: Tenant, shares_user_namespace: bool) -> PeerProcess {
        PeerProcess {
            tenant,
            shares_user_namespace,
        }
    }

    #[test]
    fn root_and_the_daemons_user_see_all_processes() {
        for process in [None, Some(peer_process(Tenant::User(0), true))] {
            let scope = |user, own| scope_of_client(user, own, process.as_ref());
            assert_eq!(scope(0, 0), Scope::All);
            assert_eq!(scope(0, 7), Scope::All);
            assert_eq!(scope(7, 7), Scope::All);
            assert_eq!(scope(8, 7), Scope::User(8));
            assert_eq!(scope(8, 0), Scope::User(8));
        }
    }

    #[test]
    fn a_pod_sees_its_own_processes() {
        let pod = peer_process(Tenant::Pod(POD_UID.to_owned()), true);
        let uid = PodUid::parse(POD_UID).unwrap();
        for user in [0, 7, 8] {
            assert_eq!(scope_of_client(user, 7, Some(&pod)), Scope::Pod(uid));
        }
        let odd = peer_process(Tenant::Pod("odd".to_owned()), true);
        assert_eq!(scope_of_client(0, 0, Some(&odd)), Scope::Machine);
    }

    #[test]
    fn root_of_a_user_namespace_is_not_root() {
        let process = peer_process(Tenant::User(1000), false);
        assert_eq!(scope_of_client(0, 0, Some(&process)), Scope::User(0));
        assert_eq!(scope_of_client(1000, 0, Some(&process)), Scope::User(1000));
    }

    #[test]
    fn only_root_and_the_daemons_user_are_trusted_by_their_user() {
        let owner = |scope, tenant: Tenant| Peer::Unix { scope, tenant }.owner();
        assert_eq!(owner(Scope::All, Tenant::User(0)), ConnectionOwner::Trusted);
        let pod = PodUid::parse(POD_UID).unwrap();
        let job = Tenant::SlurmJob("42".to_owned());
        for (scope, tenant) in [
            (Scope::User(8), Tenant::User(8)),
            (Scope::User(8), job),
            (Scope::Pod(pod), Tenant::Pod(POD_UID.to_owned())),
            (Scope::Machine, Tenant::Pod("odd".to_owned())),
        ] {
            assert_eq!(
                owner(scope, tenant.clone()),
                ConnectionOwner::Tenant(tenant)
            );
        }
        let local = [127, 0, 0, 1].into();
        assert_eq!(Peer::Tcp { local }.owner(), ConnectionOwner::Anonymous);
    }
}
