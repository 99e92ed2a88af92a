from kvstow.pool.policy.base import MAX_LEASED_SKIPS
from kvstow.pool.policy.lru import LRU
from tests.unit.pool.policy.keys import always, key, keys, never


def test_the_longest_unused_goes_first() -> None:
    policy = LRU()
    for name in keys("abcd"):
        policy.insert(name)
    policy.touch(key("a"))
    assert [policy.victim(always) for _ in range(5)] == [*keys("bcda"), None]
    assert len(policy) == 0


def test_of_a_prompt_touched_tail_first_the_head_goes_last() -> None:
    policy = LRU()
    for name in keys("abcxyz"):
        policy.insert(name)
    policy.touch_many(reversed(keys("abc")))
    assert [policy.victim(always) for _ in range(6)] == keys("xyzcba")


def test_keys_that_are_not_held_are_ignored() -> None:
    policy = LRU()
    policy.insert(key("a"))
    policy.insert(key("b"))
    policy.touch(key("x"))
    policy.touch_many(keys("xyaz"))
    policy.remove(key("x"))
    assert (len(policy), key("x") in policy, key("a") in policy) == (2, False, True)
    assert policy.victim(always) == key("b")


def test_a_leased_key_is_passed_over_and_counts_as_used() -> None:
    policy = LRU()
    for name in keys("abc"):
        policy.insert(name)
    assert policy.victim(lambda k: k != key("a")) == key("b")
    assert [policy.victim(always), policy.victim(always)] == keys("ca")


def test_g8_g9_a_search_among_leased_keys_is_bounded_and_goes_on_next_time() -> None:
    policy = LRU()
    leased = [key(str(i)) for i in range(3 * MAX_LEASED_SKIPS // 2)]
    for name in leased:
        policy.insert(name)
    policy.insert(key("free"))
    asked: list[object] = []

    def evictable(k: object) -> bool:
        asked.append(k)
        return k == key("free")

    assert policy.victim(evictable) is None
    assert len(asked) == MAX_LEASED_SKIPS
    assert policy.victim(evictable) == key("free")
    assert len(asked) == len(leased) + 1
    assert len(policy) == len(leased)


def test_nothing_to_evict() -> None:
    policy = LRU()
    assert policy.victim(always) is None
    policy.insert(key("a"))
    assert policy.victim(never) is None
    assert len(policy) == 1
