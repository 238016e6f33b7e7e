//! What nodes are for: set in the store by whichever member is asked.

use reprise_policy::NodeMode;
use reprise_proto::controlplane::{self as wire, SetNodeReply, SetNodeRequest};
use tonic::Status;

use super::PlacementService;
use crate::cluster::choosing::wire_mode;
use crate::membership::refuse;
use crate::modes;

/// Names in a refusal at the most.
const NAMES_SHOWN: usize = 16;

/// Sets what a node is for.
pub(super) async fn set(service: &PlacementService, request: SetNodeRequest) -> Result<SetNodeReply, Status> {
    let SetNodeRequest { name, mode } = request;
    let mode = match wire::NodeMode::try_from(mode) {
        Ok(wire::NodeMode::Active) => NodeMode::Active,
        Ok(wire::NodeMode::Cordoned) => NodeMode::Cordoned,
        Ok(wire::NodeMode::Draining) => NodeMode::Draining,
        Ok(wire::NodeMode::Unspecified) | Err(_) => {
            return Err(Status::invalid_argument(format!("mode {mode}: ACTIVE, CORDONED or DRAINING")));
        }
    };
    let names = service.cluster.names();
    if !names.contains(&name) {
        return Err(unknown(&name, names));
    }
    let (before, set) = modes::set(service.store.as_ref(), &service.identity, &name, mode)
        .await
        .map_err(|error| refuse(&error))?;
    service.cluster.set_mode(&name, set);
    Ok(SetNodeReply { before: wire_mode(before).into() })
}

/// That no node has this name, and which names there are.
pub(crate) fn unknown(name: &str, mut names: Vec<String>) -> Status {
    let name = name.chars().take(64).collect::<String>().escape_default().to_string();
    names.sort_unstable();
    let more = if names.len() > NAMES_SHOWN { " and others" } else { "" };
    names.truncate(NAMES_SHOWN);
    Status::not_found(match names.as_slice() {
        [] => format!("no node is called '{name}': none has registered yet"),
        names => format!("no node is called '{name}': there are {}{more}", names.join(", ")),
    })
}
