//! The epochs of CUDA contexts: destroying or resetting a context ends one, and what belongs to it counts no more.

use std::collections::BTreeMap;

use super::layout::{ANY_DEVICE, Account, AccountKey, EPOCH_SHIFT};

/// A context of a process. The primary context of a device has the address 0.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
struct ContextKey {
    process: u32,
    device: u32,
    address: u64,
}

impl ContextKey {
    /// The context that an account, or the caller of an account, belongs to.
    fn new(key: &AccountKey) -> Self {
        let address = key.context_epoch & ((1 << EPOCH_SHIFT) - 1);
        Self {
            process: key.process,
            device: if address == 0 { key.device } else { ANY_DEVICE },
            address,
        }
    }
}

/// The current epoch of every context with memory.
#[derive(Debug, Default)]
pub(super) struct ContextEpochs(BTreeMap<ContextKey, u16>);

impl ContextEpochs {
    /// From all accounts.
    pub(super) fn new(accounts: &[(AccountKey, Account)]) -> Self {
        let contexts = accounts.iter().filter(|(key, _)| key.caller == 0);
        let epochs = contexts.map(|(key, account)| {
            (
                ContextKey::new(key),
                epoch_of_word(account.held_bytes_and_epoch),
            )
        });
        Self(epochs.collect())
    }

    /// Whether the epoch that an account of a caller belongs to is over. Programs may begin an epoch while accounts are
    /// read, so an epoch that is newer than its context's is not over. Created memory belongs to no context.
    pub(super) fn is_epoch_over(&self, key: &AccountKey) -> bool {
        let current = self.0.get(&ContextKey::new(key));
        let is_older =
            |current: u16| (epoch_of_word(key.context_epoch).wrapping_sub(current) as i16) < 0;
        key.caller != 0 && current.is_some_and(|current| is_older(*current))
    }
}

fn epoch_of_word(word: u64) -> u16 {
    (word >> EPOCH_SHIFT) as u16
}

#[cfg(test)]
mod tests {
    use zerocopy::FromZeros;

    use super::*;

    const CALLER_ADDRESS: u64 = 0x1000;

    fn account_key(caller: u64, context: u64, epoch: u64, device: u32) -> AccountKey {
        AccountKey {
            caller,
            context_epoch: context | epoch << EPOCH_SHIFT,
            process: 1,
            device,
        }
    }

    fn account_of_context(context: u64, epoch: u64, device: u32) -> (AccountKey, Account) {
        let mut account = Account::new_zeroed();
        account.held_bytes_and_epoch = 500 | epoch << EPOCH_SHIFT;
        (account_key(0, context, 0, device), account)
    }

    #[test]
    fn only_earlier_epochs_of_the_same_context_are_over() {
        let epochs = ContextEpochs::new(&[
            account_of_context(0, 2, 0),
            account_of_context(0, 0, 1),
            account_of_context(7, 1, ANY_DEVICE),
        ]);
        let is_epoch_over = |context, epoch, device| {
            epochs.is_epoch_over(&account_key(CALLER_ADDRESS, context, epoch, device))
        };
        assert!(is_epoch_over(0, 1, 0));
        assert!(!is_epoch_over(0, 2, 0));
        assert!(!is_epoch_over(0, 3, 0), "it began while accounts were read");
        assert!(!is_epoch_over(0, 0, 1), "another device");
        assert!(is_epoch_over(7, 0, 0));
        assert!(!is_epoch_over(7, 1, 0));
        assert!(!is_epoch_over(8, 0, 0), "a context without an account");
        assert!(
            !is_epoch_over((1 << EPOCH_SHIFT) - 1, 0, 0),
            "created memory"
        );
        assert!(
            !epochs.is_epoch_over(&account_key(0, 0, 0, 0)),
            "the account of a device"
        );
    }

    #[test]
    fn an_epoch_that_wraps_is_newer() {
        let epochs = ContextEpochs::new(&[account_of_context(0, 0, 0)]);
        assert!(epochs.is_epoch_over(&account_key(CALLER_ADDRESS, 0, 0xffff, 0)));
    }
}
